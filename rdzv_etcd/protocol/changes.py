"""Decides when a formed round is over. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rdzv_etcd.protocol.accusations import lost_from_s
from rdzv_etcd.protocol.census import take_census
from rdzv_etcd.protocol.model import Change, Control, Nodes, Round, left_because
from rdzv_etcd.protocol.names import is_unknown
from rdzv_etcd.text import shown

NAMES_IN_CHANGE = 32
"""How many waiters, and how many lost members, a change names."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the members that their round is over."""

    change: Change


@dataclass(frozen=True, slots=True)
class Healthy:
    """Nothing to tell, or not before ``until_s`` on the leader's clock."""

    until_s: float | None = None
    reason: str = ""


def decide_change(
    control: Control,
    nodes: Nodes,
    now_s: float,
    *,
    trust_absence_s: float,
    round_trip_s: float = 0.0,
    unknown_until_s: float = math.inf,
) -> Publish | Healthy:
    """Say whether the formed round is over.

    Before ``trust_absence_s`` a member without presence is not declared lost: the leader was cut
    off itself a moment ago, and the others may be coming back (see docs: being lost is an act).
    Nor is one that may still put its presence back (see :mod:`rdzv_etcd.protocol.accusations`). A
    newcomer is a reason only if the next world would be larger with it.

    A member whose name is not known is not declared lost before ``unknown_until_s`` while a node is
    there that may be it: that node lives, so it will put its slice back or arrive again.
    """
    formed = control.formed
    if formed is None or control.open_change is not None:
        return Healthy()
    census = take_census(control, nodes, formed.settings)
    lost = {node_id: left_because(reason) for node_id, reason in census.leaving.items()}
    may_return: list[float] = []
    for node_id in census.absent:
        until_s = lost_from_s(nodes, node_id, trust_absence_s, round_trip_s)
        if (census.unplaced or census.finished) and is_unknown(node_id):
            until_s = max(until_s, unknown_until_s)
        if now_s < until_s:
            may_return.append(until_s)
        else:
            lost[node_id] = nodes.how_absent(node_id)
    live = len(census.expected) + len(census.returning) + len(may_return)
    settings = formed.settings
    possible = min(settings.max_nodes, live + len(census.newcomers))
    grows = possible // settings.node_unit * settings.node_unit > formed.size
    if lost or census.returning or grows:
        waiters = census.pool if grows or lost else census.returning
        named = [presence.info.node_id for presence in waiters]
        because = {one.info.node_id: one.info.because for one in census.returning}
        return Publish(_named_in_part(formed, named, lost, because))
    if may_return:
        until_s = min(may_return)
        reason = f"{len(may_return)} members are not back yet"
        return Healthy(None if until_s == math.inf else until_s, reason)
    return Healthy()


def _named_in_part(
    formed: Round, waiters: Sequence[str], lost: Mapping[str, str], because: Mapping[str, str]
) -> Change:
    named = tuple(waiters[:NAMES_IN_CHANGE])
    return Change(
        formed.run,
        formed.number,
        named,
        dict(islice(lost.items(), NAMES_IN_CHANGE)),
        max(0, len(waiters) - NAMES_IN_CHANGE) + max(0, len(lost) - NAMES_IN_CHANGE),
        {node_id: shown(because[node_id]) for node_id in named if because.get(node_id)},
    )
