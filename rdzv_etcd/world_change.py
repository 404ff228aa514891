"""Why a world is over, as its member sees it: one frozen value per kind, and its words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from rdzv_etcd.names import display_name, display_names
from rdzv_etcd.text import shown


class Loss(Enum):
    """How a member was lost."""

    EXPIRED = "lease expired"
    LEFT = "left"
    """Followed by the reason, if it gave one: see :func:`left_because`."""


_SHOWN_REASON = 100
_LEFT = f"{Loss.LEFT.value}: "


def left_because(reason: str) -> str:
    """How a member was lost that said why it leaves."""
    reason = shown(reason, _SHOWN_REASON)
    return Loss.LEFT.value if reason in ("", Loss.LEFT.value) else _LEFT + reason


def reason_to_leave(how: str) -> str | None:
    """The reason in :func:`left_because`; ``None`` if the member was lost in another way."""
    if how == Loss.LEFT.value:
        return how
    return how.removeprefix(_LEFT) if how.startswith(_LEFT) else None


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
