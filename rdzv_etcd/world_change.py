"""How members are lost, and why a world is over for its member: the values, and their only words.

Logs, events, errors, metrics' labels and commands take them from here; what a job waits for is
worded in :mod:`rdzv_etcd.protocol.describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from rdzv_etcd.names import LOOKED_AT, Names
from rdzv_etcd.text import shown

Namer: TypeAlias = "Callable[[str], str]"
"""How a node is called; see :class:`~rdzv_etcd.names.Names`."""

_NAMED = 8
"""The number of members that a line describes as lost or left."""
_WHYS = 3
"""The number of nodes of which a line describes why they rejoined."""


class _InWords:
    """Its text is that of :func:`text_of`."""

    __slots__ = ()

    def __str__(self) -> str:
        ids: list[str] = []
        for name in ("members", "nodes"):
            ids += getattr(self, name, ())
        return text_of(self, Names(ids))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Lost(_InWords):
    """Members were lost."""

    members: Mapping[str, str]
    """Node ids, and how each was lost; the first 32."""
    waiting: tuple[str, ...] = ()
    """The nodes that also wait for the next round."""


@dataclass(frozen=True, slots=True)
class Left(_InWords):
    """Members left, and announced that."""

    members: Mapping[str, str]
    """Node ids, and the reason that each gave; the first 32."""
    waiting: tuple[str, ...] = ()
    """The nodes that also wait for the next round."""


@dataclass(frozen=True, slots=True)
class Waiting(_InWords):
    """Nodes wait for the next round: newcomers, or members that rejoined."""

    nodes: tuple[str, ...]
    """Node ids; the first 32."""
    because: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Why members rejoined, by node id, if they gave a reason: how a worker failed."""


@dataclass(frozen=True, slots=True)
class Expelled(_InWords):
    """The others formed a new world without this node, which did not rejoin in time."""


@dataclass(frozen=True, slots=True)
class MovedOn(_InWords):
    """This node itself has joined again, or has left; or this process is a forked child."""

    because: str = ""
    """Which of its calls was interrupted, if that is why."""


@dataclass(frozen=True, slots=True)
class Finished(_InWords):
    """The job's work is done."""

    by: str
    """The id of the node that closed the job."""
    reason: str


@dataclass(frozen=True, slots=True)
class Failed(_InWords):
    """The job has failed, or this node cannot continue."""

    by: str
    """The id of the node that closed the job."""
    reason: str


WorldChange: TypeAlias = "Lost | Left | Waiting | Expelled | MovedOn | Finished | Failed"


# --- how a member was lost, and why it left ---------------------------------------------------


LEASE_EXPIRED = "lease expired"
PROCESS_EXITED = "its process exited"
HOST_SILENT = "its host is silent"
LEFT = "left"
"""Followed by the reason, if the member gave one: see :func:`left_because`."""
_EVICTED = "evicted by"
_CAUSES = {
    LEASE_EXPIRED: "lease_expired",
    PROCESS_EXITED: "process_gone",
    HOST_SILENT: "host_silent",
    _EVICTED: "evicted",
}
"""The labels of the metrics, by how the text begins."""
_SHOWN_REASON = 100


def left_because(reason: str) -> str:
    """Word the loss of a member that gave a reason for leaving."""
    reason = shown(reason, _SHOWN_REASON)
    return LEFT if reason in ("", LEFT) else f"{LEFT}: {reason}"


def reason_to_leave(how: str) -> str | None:
    """Return the reason in :func:`left_because`; ``None`` if the member was lost in another way."""
    word, _, reason = how.partition(": ")
    return (reason or LEFT) if word == LEFT else None


def how_gone(by: str, why: str, after_s: float | None = None) -> str:
    """The process has exited; ``by``: the node that noticed, ``after_s``: seconds since its link
    ended."""
    within = "" if after_s is None else f" within {1000 * after_s:.0f} ms"
    return f"{PROCESS_EXITED} ({why}; noticed by {by}{within})"


def how_silent(by: str, why: str) -> str:
    """The node answered neither its neighbor nor etcd."""
    return f"{HOST_SILENT} ({why}; noticed by {by})"


def how_evicted(by: str, reason: str) -> str:
    """An operator has found that the node does not answer."""
    return shown(f"{_EVICTED} {by}{f': {reason}' if reason else ''}")


def cause_of_loss(how: str) -> str:
    """Name the kind of a loss, as metrics count it; ``how`` is the text that a change has."""
    return next((cause for words, cause in _CAUSES.items() if how.startswith(words)), "other")


def lost(name: str, how: str) -> str:
    """A member was declared lost."""
    return f"lost {name}: {shown(how)}"


def left(name: str, reason: str) -> str:
    """A node has left."""
    reason = "" if reason == LEFT else shown(reason)
    return f"{name} left ({reason})" if reason else f"{name} left"


def rejoined(name: str, why: str) -> str:
    """A member has joined again, for a reason of its own."""
    return f"{name} rejoined ({shown(why)})"


def may_be_gone(name: str, how: str) -> str:
    """A node was accused, and may still answer."""
    return f"{name} may be gone: {shown(how)}"


# --- why a world is over -------------------------------------------------------------------------


def text_of(change: WorldChange, name: Namer) -> str:
    """Describe why a world is over; ``name`` names the nodes."""
    match change:
        case Lost(members):
            return change_text(name, members, {})
        case Left(members):
            return change_text(name, {}, members)
        case Waiting(nodes, because):
            return change_text(name, {}, {}, nodes, because)
        case Expelled():
            return _EXPELLED
        case MovedOn(because):
            return _moved_on(because)
        case Finished(by, reason) | Failed(by, reason):
            succeeded = isinstance(change, Finished)
            return end_text(name(by), reason, succeeded=succeeded)


def change_text(
    name: Namer,
    lost_: Mapping[str, str],
    left_: Mapping[str, str],
    waiters: Sequence[str] = (),
    because: Mapping[str, str] | None = None,
    *,
    unnamed: int = 0,
) -> str:
    """Describe why a world is over: which nodes were lost, left, rejoined and joined."""
    for node in (*islice(lost_, LOOKED_AT), *islice(left_, LOOKED_AT), *waiters[:LOOKED_AT]):
        name(node)  # from now on it is known
    parts = [
        *first(lost_, lambda node: lost(name(node), lost_[node])),
        *first(left_, lambda node: left(name(node), left_[node])),
    ]
    whys = because or {}
    explained = [node for node in waiters if node in whys][:_WHYS]
    parts += [rejoined(name(node), whys[node]) for node in explained]
    others = [node for node in waiters if node not in explained]
    if others:
        parts.append(f"{', '.join(first(others, name))} joined")
    if unnamed:
        parts.append(f"{unnamed} more")
    return "; ".join(parts)


def first(nodes: Collection[str], word: Callable[[str], str]) -> list[str]:
    """Word the first of them, and count the others: there may be thousands."""
    more = [f"{len(nodes) - _NAMED} more"] if len(nodes) > _NAMED else []
    return [*map(word, islice(nodes, _NAMED)), *more]


_EXPELLED = "the other nodes formed a new world without this one"


def _moved_on(because: str) -> str:
    """This node itself has ended its part; ``because`` a call of its own was interrupted."""
    if because:
        return f"this node {because}, which ended its part in this world"
    return "this node has joined again, or has left"


def end_text(name: str, reason: str, *, succeeded: bool) -> str:
    """A run of the job has ended."""
    how = "finished the job" if succeeded else "closed the job as failed"
    return f"{name} {how}: {shown(reason)}"
