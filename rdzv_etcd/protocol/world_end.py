"""Why a world is over, as its member sees it: one frozen value per kind, and which it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Closure, Control, left_because, reason_to_leave
from rdzv_etcd.protocol.names import display_name, display_names
from rdzv_etcd.protocol.steps import waiting_count
from rdzv_etcd.text import shown

_NAMED = 8
"""Members that were lost, or left, of which a line says how or why."""
_TOLD = 3
"""Of how many nodes a line says why they came back."""


def _first(parts: Iterable[str]) -> str:
    named = list(parts)
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


@dataclass(frozen=True, slots=True)
class Lost:
    """Members were lost."""

    members: Mapping[str, str]
    """Node ids, and how each was lost; the first 32."""
    waiting: tuple[str, ...] = ()
    """The nodes that wait for the next round as well."""

    def __str__(self) -> str:
        return _first(
            f"{display_name(one)} lost ({shown(how)})" for one, how in self.members.items()
        )


@dataclass(frozen=True, slots=True)
class Left:
    """Members left, and said so."""

    members: Mapping[str, str]
    """Node ids, and the reason that each gave; the first 32."""
    waiting: tuple[str, ...] = ()
    """The nodes that wait for the next round as well."""

    def __str__(self) -> str:
        return _first(
            f"{display_name(one)} {left_because(why)}" for one, why in self.members.items()
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nodes wait for the next round: newcomers, or members that came back."""

    nodes: tuple[str, ...]
    """Node ids; the first 32."""
    because: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Why members came back, by their node ids, as far as they said so: how a worker failed."""

    def __str__(self) -> str:
        told = [node for node in self.nodes if node in self.because][:_TOLD]
        parts = [f"{display_name(node)} came back ({shown(self.because[node])})" for node in told]
        others = [node for node in self.nodes if node not in told]
        if others:
            parts.append(f"{display_names(others)} waiting")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Expelled:
    """The others went on without this node, which did not come back in time."""

    def __str__(self) -> str:
        return "the others went on without this node"


@dataclass(frozen=True, slots=True)
class MovedOn:
    """This node itself has joined again, or has left; or this process is a forked child."""

    because: str = ""
    """Why it had to, if a call of its own was interrupted."""

    def __str__(self) -> str:
        if self.because:
            return f"this node {self.because}, which ended its part in this world"
        return "this node has joined again, or has left"


@dataclass(frozen=True, slots=True)
class Finished:
    """The job's work is done."""

    by: str
    """The node that said so, its id."""
    reason: str

    def __str__(self) -> str:
        return f"{display_name(self.by)} finished the job: {self.reason}"


@dataclass(frozen=True, slots=True)
class Failed:
    """The job has failed, or this node cannot go on."""

    by: str
    """The node that said so, its id."""
    reason: str

    def __str__(self) -> str:
        return f"{display_name(self.by)} gave the job up: {self.reason}"


WorldChange: TypeAlias = "Lost | Left | Waiting | Expelled | MovedOn | Finished | Failed"


def why_over(member: Member, control: Control, epoch: int) -> WorldChange | None:
    """Say why the world of that epoch is over for this node; ``None`` while it is not."""
    if not member.works_in(epoch):
        return MovedOn(member.why_given_up(epoch))
    if member.closure is not None:
        return end_of(member.closure)
    if member.failure is not None:
        task, error = member.failure
        return Failed(member.node_id, f"its task {task!r} failed: {error}")
    if waiting_count(control, member.record, member.evicted) == 0:
        return None
    change = control.change
    if member.evicted or change is None or not change.concerns(member.record):
        return Expelled()
    return Expelled() if member.node_id in change.lost else change_of(change)


def others_reason(member: Member, control: Control) -> WorldChange | None:
    """Why the world that this node works in is over, if that is not of its own making and nothing
    that all were meant to do; of a node that has finished only the job's failure is told."""
    why = why_over(member, control, member.epoch)
    if member.has_finished and not isinstance(why, Failed):
        return None
    return None if isinstance(why, MovedOn | Finished) else why


def end_of(closure: Closure) -> Finished | Failed:
    """Say why a world is over whose job was closed."""
    return (Finished if closure.succeeded else Failed)(closure.by, closure.reason)


def change_of(change: Change) -> Lost | Left | Waiting:
    """Say why a world is over, as the leader has published it."""
    lost, left = lost_and_left(change.lost)
    if lost:
        return Lost(lost, change.waiters)
    if left:
        return Left(left, change.waiters)
    return Waiting(change.waiters, change.because)


def lost_and_left(gone: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Part the members that a change says are gone: those that were lost, and how, and those that
    left, and why."""
    reasons = {node: reason_to_leave(how) for node, how in gone.items()}
    lost = {node: how for node, how in gone.items() if reasons[node] is None}
    return lost, {node: reason for node, reason in reasons.items() if reason is not None}


def change_text(change: Change) -> str:
    """Say why a world is over, with all that a change holds."""
    lost, left = lost_and_left(change.lost)
    waiting = Waiting(change.waiters, change.because)
    more = f"{change.unnamed} more" if change.unnamed else ""
    return ", ".join(
        part for part in (str(Lost(lost)), str(Left(left)), str(waiting), more) if part
    )
