"""Sorts the live nodes by their part in the next round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.model import Control, NodeInfo, Nodes, Presence
from rdzv_etcd.settings import JobSettings


@dataclass(frozen=True, slots=True)
class Census:
    """The live nodes, seen from the next round."""

    returning: tuple[Presence, ...]
    """Members of the formed round that have arrived again, by rank; before them members of a later
    round that etcd has lost, and members of this one whose ranks are unknown."""
    newcomers: tuple[Presence, ...]
    """Waiters that are not members, in order of arrival: late nodes and spares."""
    expected: tuple[str, ...]
    """Live members that have not arrived again yet: they will, or they will be lost.

    Includes one that returned just as it was declared lost: it also sees the change.
    """
    absent: tuple[str, ...]
    """Members without a presence."""
    leaving: Mapping[str, str]
    """Members that announced that they leave, and why."""
    strangers: tuple[Presence, ...]
    """Waiters whose settings differ from the job's, which each detects itself, and leaves; or that
    lack a domain where segments are wanted."""
    idle: tuple[str, ...]
    """Live non-members that are not waiting (expelled, of a closed run, or unplaced)."""
    unplaced: tuple[str, ...] = ()
    """Idle nodes that may be members: not all members of the formed round are known."""
    finished: tuple[str, ...] = ()
    """Nodes whose work is done, members and others: none of them joins the next round."""

    def candidates(self, nodes: Nodes) -> list[NodeInfo]:
        """All nodes that may be in the next world, in order of preference."""
        working = [nodes.present[node_id].info for node_id in self.expected]
        return working + [presence.info for presence in self.pool]

    @property
    def pool(self) -> tuple[Presence, ...]:
        """All nodes that may get a rank, in order of preference."""
        return self.returning + self.newcomers


def take_census(control: Control, nodes: Nodes, settings: JobSettings) -> Census:
    """Sort the present nodes; ``settings`` are the job's."""
    record = control.round
    formed = control.formed
    members: Sequence[str] = () if formed is None else formed.members
    returning: list[Presence] = []
    expected: list[str] = []
    absent: list[str] = []
    leaving: dict[str, str] = {}
    finished = tuple(node_id for node_id, here in nodes.present.items() if _has_finished(here))
    done = set(finished)
    for node_id in (each for each in members if each not in done):
        presence = nodes.present.get(node_id)
        reason = nodes.left.get(node_id) if presence is None else presence.info.leaving
        if reason is not None:
            leaving[node_id] = reason
        elif presence is None:
            absent.append(node_id)
        elif formed is not None and presence.info.arrived_for > formed.number:
            returning.append(presence)
        else:
            expected.append(node_id)
    newcomers: list[Presence] = []
    strangers: list[Presence] = []
    idle: list[str] = []
    unplaced: list[str] = []
    seated = {*members, *done}
    expelled = set() if record is None else set(record.expelled)
    # A member without a name has no presence; a node that has not arrived again may be that member,
    # at work or about to return.
    some_unknown = formed is not None and formed.slices is not None and any(map(is_unknown, absent))
    others = [presence for node_id, presence in nodes.present.items() if node_id not in seated]
    for presence in sorted(others, key=lambda presence: presence.order):
        info = presence.info
        if info.leaving is not None:
            continue
        asks_again = _asks_again(presence, control)
        if some_unknown:
            asks_again = asks_again and presence.mod_revision > control.round_revision
        # If the record was put back, a spare has arrived again since; a presence that has not may
        # be that of a dead node, restored with an older snapshot of etcd.
        must_ask = formed is None or formed.epoch_fixed is not None or info.node_id in expelled
        if not asks_again and (must_ask or some_unknown):
            idle.append(info.node_id)
            if some_unknown and info.node_id not in expelled:
                unplaced.append(info.node_id)
        elif info.settings != settings or (settings.has_segments and info.domain is None):
            strangers.append(presence)
        else:
            newcomers.append(presence)
    # If etcd lost data, its record may not name the members of the latest world, or their slice may
    # be gone: they come first.
    since = math.inf if formed is None else control.epoch + (0 if some_unknown else 1)
    later = [each for each in newcomers if each.info.epoch_trained >= since]
    newcomers = [each for each in newcomers if each.info.epoch_trained < since]
    return Census(
        (*later, *returning),
        tuple(newcomers),
        tuple(expected),
        tuple(absent),
        leaving,
        tuple(strangers),
        tuple(idle),
        tuple(unplaced),
        finished,
    )


def missing(control: Control, nodes: Nodes, census: Census) -> dict[str, str]:
    """Return the members that are absent, and how each was lost or why it left, as far as that is
    known; those whose names are unknown are left out."""
    change = control.open_change
    declared: Mapping[str, str] = {} if change is None else change.lost
    return {
        node_id: declared.get(node_id) or nodes.how_absent(node_id)
        for node_id in census.absent
        if not is_unknown(node_id)
    }


def _has_finished(presence: Presence) -> bool:
    return presence.info.finished and presence.info.leaving is None


def _asks_again(presence: Presence, control: Control) -> bool:
    """Whether the node asks for a seat in the round that follows the record.

    After the end of a run only nodes that arrived since do, for a new run of the job: a spare of
    the run that ended had asked for the same number, and is about to see the end. Members of that
    run may also still be there when its marker has expired.
    """
    record = control.round
    if record is None:  # the next round is the first; a higher number belongs to a run that is over
        return presence.info.arrived_for <= 1 and presence.mod_revision > control.ended_revision
    if record.closure is not None:
        return presence.mod_revision > control.round_revision
    return presence.info.arrived_for > record.number
