"""The events of a job, from two views of it that follow each other. Pure.

A view holds all of the job that is watched: the control keys and the presences. The events between
two views do not depend on how many changes there were: after a break, or if some were left out,
those that can still be seen are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.protocol.model import Change, Control, Ended, Nodes
from rdzv_etcd.protocol.world_end import change_of, end_of
from rdzv_etcd.world_change import WorldChange, reason_to_leave


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """The time of an observation; events that differ only in it are equal."""

    at_s: float = field(default=0.0, compare=False)
    """Seconds on the observer's monotonic clock: ``CLOCK_BOOTTIME`` on Linux, else
    ``time.monotonic``."""
    wall_s: float = field(default=0.0, compare=False)
    """Seconds since 1970 on the observer's wall clock (``time.time``)."""


@dataclass(frozen=True, slots=True)
class Snapshot(_Observed):
    """The state of the job: the first event, and the one that follows :class:`Missed`."""

    state: JobState


@dataclass(frozen=True, slots=True)
class Joined(_Observed):
    """A node joined: it has arrived for a world, or was missing and is back."""

    node: str
    """Its node id."""


@dataclass(frozen=True, slots=True)
class NodeMissing(_Observed):
    """A member's presence is gone, and the member had not announced that. It is not lost before the
    job's leader has declared it lost: if it lives, it comes back (:class:`Joined`)."""

    node: str
    """Its node id."""
    how: str
    """``lease expired``, or the evidence of another node."""


@dataclass(frozen=True, slots=True)
class NodeLost(_Observed):
    """A member was declared lost; or a node that was no member is gone unannounced."""

    node: str
    """Its node id."""
    how: str
    """``lease expired``, or the evidence of another node."""
    after_s: float | None = None
    """Seconds from the end of its process to this observation; ``None`` if that end was not seen,
    as when its lease ran out."""


@dataclass(frozen=True, slots=True)
class NodeLeft(_Observed):
    """A node has left, and announced that."""

    node: str
    """Its node id."""
    reason: str
    """The reason that it gave, or that its run is over."""


@dataclass(frozen=True, slots=True)
class WorldFormed(_Observed):
    """A world was formed."""

    round: int
    epoch: int
    size: int
    members: tuple[str, ...]
    """The node ids by rank; empty if they are not known (a large world whose ranks etcd has lost
    for the moment)."""
    formed_in_s: float | None = None
    """Seconds since the end of the world before it, or since the arrival of the first node;
    ``None`` if that was not observed."""


@dataclass(frozen=True, slots=True)
class WorldOver(_Observed):
    """A world is over."""

    round: int
    epoch: int
    change: WorldChange | None
    """Why, as :attr:`rdzv_etcd.World.change`; ``None`` if that was not observed."""


@dataclass(frozen=True, slots=True)
class JobEnded(_Observed):
    """A run of the job is over; another one may follow."""

    succeeded: bool
    """Whether its work is done."""
    by: str
    """The id of the node that closed it."""
    reason: str


@dataclass(frozen=True, slots=True)
class Missed(_Observed):
    """The reader was too slow, and events were dropped; a :class:`Snapshot` follows."""

    count: int
    """How many events were dropped."""


JobEvent: TypeAlias = (
    "Snapshot | Joined | NodeMissing | NodeLost | NodeLeft | WorldFormed | WorldOver | JobEnded"
    " | Missed"
)


@dataclass(frozen=True, slots=True)
class _World:
    """The last world that was seen."""

    round: int
    epoch: int
    size: int
    origin: str
    members: tuple[str, ...]
    is_over: bool = False
    change: WorldChange | None = None
    over_at_s: float | None = None
    """When it was seen to be over; ``None``: not before the next one was there."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as an observer sees it at one moment; :func:`view_after` makes the next one."""

    control: Control
    nodes: Nodes
    at_s: float
    wall_s: float
    touched: frozenset[str] | None = None
    """The nodes that may differ from the view before; ``None``: any."""
    members: frozenset[str] = frozenset()
    """Those of the formed round."""
    world: _World | None = None
    waited_since_s: float | None = None
    """When the first node was seen to wait for the first world."""
    ended_epoch: int = 0
    """The highest epoch of all runs whose end was seen."""


def view_after(
    before: JobView | None,
    control: Control,
    nodes: Nodes,
    *,
    at_s: float,
    wall_s: float,
    touched: Iterable[str] | None = None,
) -> JobView:
    """Make the view that follows ``before``. ``control`` names all members of a large world, too,
    as far as they are known."""
    formed = control.formed
    world = None if before is None else before.world
    if formed is not None and control.epoch > (0 if world is None else world.epoch):
        world = _World(formed.number, control.epoch, formed.size, formed.origin, formed.members)
    elif formed is not None and world is not None and world.epoch == control.epoch:
        world = replace(world, members=formed.members)
    if world is not None and not world.is_over:
        change = _why_over(world, control)
        if change is not None:
            world = replace(world, is_over=True, change=change, over_at_s=at_s)
    return JobView(
        control,
        nodes,
        at_s,
        wall_s,
        None if before is None or touched is None else frozenset(touched),
        _members(before, control),
        world,
        _waited_since_s(before, nodes, at_s),
        max(
            0 if before is None else before.ended_epoch,
            max((ended.epoch for ended in control.ended), default=0),
        ),
    )


def _why_over(world: _World, control: Control) -> WorldChange | None:
    closure = control.end_of(world.origin)
    if closure is not None:
        return end_of(closure)
    change = control.open_change
    return None if change is None or control.epoch != world.epoch else change_of(change)


def _members(before: JobView | None, control: Control) -> frozenset[str]:
    formed = control.formed
    if formed is None:
        return frozenset()
    was = None if before is None else before.control.formed
    if before is not None and was is not None and was.members is formed.members:
        return before.members
    return frozenset(member for member in formed.members if not is_unknown(member))


def _waited_since_s(before: JobView | None, nodes: Nodes, at_s: float) -> float | None:
    """Only an observer that has seen no node there knows when the first one joined."""
    if before is None or not nodes.present:
        return None
    return before.waited_since_s if before.nodes.present else at_s


_RUN_IS_OVER = "its run is over"


class _Standing(Enum):
    AWAY = "not there, and not waited for"
    THERE = "there"
    MISSING = "a member that is not there"
    LEFT = "has left"
    LOST = "was declared lost"


def happened(before: JobView, after: JobView) -> list[JobEvent]:
    """Return the events between two views."""
    events: list[JobEvent] = []
    for node_id in _candidates(before, after):
        events += _of_node(node_id, before, after)
    if before.world is not None and not before.world.is_over:
        events += _of_world(before.world, after)
    for ended in _ends(before, after.control):
        closure = ended.closure
        events.append(JobEnded(closure.succeeded, closure.by, closure.reason))
    world = after.world
    if world is not None and (before.world is None or world.epoch != before.world.epoch):
        named = () if any(map(is_unknown, world.members)) else world.members
        formed_in_s = _formed_in_s(before, after)
        events.append(WorldFormed(world.round, world.epoch, world.size, named, formed_in_s))
        if world.is_over:
            events.append(WorldOver(world.round, world.epoch, world.change))
    return [replace(event, at_s=after.at_s, wall_s=after.wall_s) for event in events]


def _candidates(before: JobView, after: JobView) -> Iterator[str]:
    """Yield the nodes that may have an event, each once."""
    if after.touched is None:
        found = {*before.nodes.present, *after.nodes.present, *before.members, *after.members}
        return iter(sorted(found))
    found = set(after.touched)
    change = after.control.open_change
    if change is not None and after.control.change_revision != before.control.change_revision:
        found |= change.lost.keys()
        if change.unnamed:
            found |= after.members - after.nodes.present.keys()
    if before.members is not after.members:
        found |= (before.members | after.members) - after.nodes.present.keys()
    return iter(sorted(found))


def _of_node(node_id: str, before: JobView, after: JobView) -> Iterator[JobEvent]:
    was, _ = _standing(before, node_id)
    now, how = _standing(after, node_id)
    if was is now:
        return
    if now is _Standing.THERE:
        yield Joined(node_id)
    elif now is _Standing.MISSING and was is not _Standing.LEFT:
        yield NodeMissing(node_id, how)
    elif now is _Standing.LEFT and was in (_Standing.THERE, _Standing.MISSING):
        yield NodeLeft(node_id, how)
    elif was is _Standing.THERE and now is _Standing.AWAY and _is_over_for(node_id, before, after):
        yield NodeLeft(node_id, _RUN_IS_OVER)
    elif was in (_Standing.THERE, _Standing.MISSING) and now in (_Standing.LOST, _Standing.AWAY):
        yield NodeLost(node_id, how, _gone_for_s(node_id, before, after))


def _standing(view: JobView, node_id: str) -> tuple[_Standing, str]:
    """Return what a node is, and how it was lost or why it left."""
    presence, nodes, control = view.nodes.present.get(node_id), view.nodes, view.control
    change = control.open_change
    declared = None if change is None else change.lost.get(node_id)
    if presence is not None:
        if presence.info.leaving is not None:
            return _Standing.LEFT, presence.info.leaving
        if declared is None or presence.mod_revision > control.change_revision:
            return _Standing.THERE, ""
    if declared is not None:
        reason = reason_to_leave(declared)
        return (_Standing.LOST, declared) if reason is None else (_Standing.LEFT, reason)
    if node_id in nodes.left:
        return _Standing.LEFT, nodes.left[node_id]
    how = nodes.how_absent(node_id)
    if node_id not in view.members:
        return _Standing.AWAY, how
    return (_Standing.LOST if _may_be_lost(change) else _Standing.MISSING), how


def _is_over_for(node_id: str, before: JobView, after: JobView) -> bool:
    """Whether a run has ended since the node arrived: then it leaves without announcing that."""
    presence = before.nodes.present.get(node_id)
    return presence is not None and presence.mod_revision < after.control.ended_revision


def _may_be_lost(change: Change | None) -> bool:
    """Whether a change has been published that does not name all members that it declares lost."""
    return change is not None and change.unnamed > 0


def _gone_for_s(node_id: str, before: JobView, after: JobView) -> float | None:
    accused = after.nodes.accused.get(node_id) or before.nodes.accused.get(node_id)
    return None if accused is None else accused.gone_for_s(after.at_s)


def _of_world(world: _World, after: JobView) -> Iterator[WorldOver]:
    now = after.world
    if now is None or now.epoch != world.epoch:
        closure = after.control.end_of(world.origin)
        change = None if closure is None else end_of(closure)
        yield WorldOver(world.round, world.epoch, change)
    elif now.is_over:
        yield WorldOver(world.round, world.epoch, now.change)


def _ends(before: JobView, after: Control) -> list[Ended]:
    """Return the runs that have ended since. An etcd that was restored shows earlier ones again,
    which it had forgotten; epochs only grow."""
    least = 0 if before.world is None else before.world.epoch
    return [run for run in after.ended if run.epoch >= least and run.epoch > before.ended_epoch]


def _formed_in_s(before: JobView, after: JobView) -> float | None:
    last, world, since_s = before.world, after.world, before.waited_since_s
    if last is not None and world is not None and last.origin == world.origin:
        since_s = last.over_at_s
    elif last is not None and since_s is not None and since_s < (last.over_at_s or since_s):
        since_s = None  # since then, nodes of the run before were there
    return None if since_s is None else max(0.0, after.at_s - since_s)
