"""Decides why a world is over for its member, and what kind of end and loss that was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rdzv_etcd.protocol.describe import lost_and_left
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Closure, Control, Nodes
from rdzv_etcd.protocol.steps import waiting_count
from rdzv_etcd.world_change import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
    cause_of_loss,
    reason_to_leave,
)


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
    that all were meant to do; to a node that has finished only the job's failure matters."""
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


# --- kinds, for who counts them ------------------------------------------------------------------

_ENDS: dict[type[WorldChange], str] = {
    Lost: "lost",
    Left: "left",
    Waiting: "waiting",
    Expelled: "expelled",
    Finished: "finished",
    Failed: "failed",
    MovedOn: "moved_on",
}


@dataclass(frozen=True, slots=True)
class MemberLoss:
    """One member that was declared lost."""

    node_id: str
    cause: str
    after_s: float | None
    """How many seconds after the end of its process; ``None`` if nobody has seen that."""


def losses(change: Change, nodes: Nodes, at_s: float) -> Iterator[MemberLoss]:
    """Yield the losses of a change that is published at ``at_s``, by the clock of ``nodes``.

    A node that has left is not lost. A change names the first 32 only.
    """
    for node_id, how in change.lost.items():
        if reason_to_leave(how) is not None:
            continue
        accused = nodes.accused.get(node_id)
        after_s = None
        if accused is not None and accused.accusation.after_ms is not None:
            after_s = max(0.0, at_s - accused.seen_s) + accused.accusation.after_ms / 1000
        yield MemberLoss(node_id, cause_of_loss(how), after_s)


def cause_of_end(change: WorldChange) -> str:
    """Name the kind of a world's end."""
    return _ENDS[type(change)]
