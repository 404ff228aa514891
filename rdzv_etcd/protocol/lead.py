"""Decides what a leader does next: publish that the round is over, close the next one, or wait.

The round is over: :func:`decide_change`. The next one is closed: :mod:`rdzv_etcd.protocol.closing`.
When which of them applies: :func:`leader_step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.census import Census, take_census
from rdzv_etcd.protocol.closing import Close, KeepWaiting, decide_close
from rdzv_etcd.protocol.liveness import doubted, lost_from_s
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Control, Nodes, Round
from rdzv_etcd.protocol.segments import largest_world
from rdzv_etcd.protocol.steps import holds_lead
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import many, shown
from rdzv_etcd.world_change import left_because

NAMES_IN_CHANGE = 32
"""How many waiters, and how many lost members, a change names."""


def decide_change(
    control: Control,
    nodes: Nodes,
    now_s: float,
    *,
    trust_absence_s: float,
    round_trip_s: float = 0.0,
    unknown_until_s: float = math.inf,
) -> Change | KeepWaiting:
    """Decide whether the formed round is over: then return the change to publish.

    Before ``trust_absence_s`` a member without presence is not declared lost: the leader was cut
    off itself a moment ago, and the others may be about to return (see docs: being lost is an act).
    Nor is one that may still put its presence back (see :mod:`rdzv_etcd.protocol.liveness`). A
    newcomer is a reason only if the next world would be larger with it.

    A member whose name is not known is not declared lost before ``unknown_until_s`` while a node is
    there that may be it: that node lives, so it will put its slice back or arrive again.
    """
    formed = control.formed
    if formed is None or control.open_change is not None:
        return KeepWaiting()
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
    grows = _grows(formed, nodes, census, len(may_return))
    if lost or census.returning or grows:
        waiters = census.pool if grows or lost else census.returning
        named = [presence.info.node_id for presence in waiters]
        because = {one.info.node_id: one.info.because for one in census.returning}
        return _named_in_part(formed, named, lost, because)
    if may_return:
        until_s = min(may_return)
        reason = f"{many(len(may_return), 'member')} not back yet"
        return KeepWaiting(None if until_s == math.inf else until_s, reason)
    return KeepWaiting()


def _grows(formed: Round, nodes: Nodes, census: Census, missing: int) -> bool:
    """Whether the next world would be larger than this one; so many members are ``missing`` that
    may return."""
    settings = formed.settings
    if not settings.has_segments:
        live = len(census.expected) + len(census.pool) + missing
        return settings.fitting(live) > formed.size
    if missing or not census.newcomers:
        return False  # it will be, if they return
    if not set(formed.members).isdisjoint(census.finished):
        return False  # the rest of its segment would lose their seats
    return largest_world(census.candidates(nodes), settings, formed) > formed.size


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


@dataclass(frozen=True, slots=True)
class Times:
    """The times that a leader's decision depends on, on its clock."""

    now_s: float
    in_contact_since_s: float
    """Since when it has been in contact with etcd."""
    trust_absence_s: float
    """From when on it may conclude that a member without presence is gone."""
    incomplete_since_s: float
    """Since when it leads a world of which it does not know all members."""
    lease_ttl_s: float
    """The longest TTL of the leases in its world."""
    round_trip_s: float = 0.0
    """How long etcd took to answer last."""


LeaderStep = Change | Close | KeepWaiting

_TTLS_OF_AN_EDIT = 3
"""How long a role may lack something while it is edited."""


def leader_step(
    member: Member,
    control: Control,
    nodes: Nodes,
    settings: Settings,
    times: Times,
) -> LeaderStep:
    """Decide what the leader does next; ``settings`` are those that it was started with."""
    nodes = doubted(nodes, member.doubted_revision)
    change = decide_change(
        control,
        nodes,
        times.now_s,
        trust_absence_s=times.trust_absence_s,
        round_trip_s=times.round_trip_s,
        unknown_until_s=times.incomplete_since_s + settings.timing.rejoin_timeout_s,
    )
    if isinstance(change, Change) or not _is_open(member, control):
        return change
    closing = _closing_step(member, control, nodes, settings, times)
    if isinstance(closing, Close):
        return closing
    times_s = [until_s for until_s in (change.until_s, closing.until_s) if until_s is not None]
    return KeepWaiting(min(times_s, default=None), closing.reason)


def _is_open(member: Member, control: Control) -> bool:
    """Whether the next round may be closed now."""
    if control.formed is not None:
        return control.open_change is not None
    # If the record of this node's round was lost, the members put it back.
    return control.round is not None or member.record is None


def _closing_step(
    member: Member,
    control: Control,
    nodes: Nodes,
    settings: Settings,
    times: Times,
) -> Close | KeepWaiting:
    # Also if this leader was in contact all the time and only the job lease ran out: members that
    # cannot reach etcd for a TTL lose their own leases, too.
    until_s = max(times.trust_absence_s, member.opened_s + times.lease_ttl_s)
    if times.now_s < until_s and _may_be_put_back(member, control, nodes, embed=settings.embed):
        return KeepWaiting(until_s, "the round record was lost; its members may put it back")
    formed, timing = control.formed, settings.timing
    return decide_close(
        control,
        nodes,
        settings.job if formed is None else formed.settings,
        timing,
        times.now_s,
        # it does not begin again with each leader
        opened_s=max(member.arrivable_s, times.in_contact_since_s),
        give_up_s=member.closes_by_s,
        round_trip_s=times.round_trip_s,
    )


def _may_be_put_back(member: Member, control: Control, nodes: Nodes, *, embed: bool) -> bool:
    """Whether the round record is gone and its members may be there, to put it back.

    The last node removes it, when no other is there. Then all presences are younger, and etcd still
    remembers the job.
    """
    if control.round is not None or not member.epoch_seen:
        return False
    gone = member.gone_revision
    remembers = control.epoch_base > 0 or embed
    older = any(node.create_revision <= gone for node in nodes.present.values())
    return not gone or not remembers or older


def departure(member: Member, control: Control, session: int, reason: str) -> Change | None:
    """Return the change that a node publishes as it leaves: that its world is over, if it leads
    that, so that the others need not wait for the next leader."""
    formed = control.formed
    if formed is None or control.open_change is not None or member.rank_in(formed) is None:
        return None
    if not holds_lead(member, control, session):
        return None
    return Change(formed.run, formed.number, (), {member.node_id: left_because(reason)})


def is_unfit_to_lead(
    member: Member,
    control: Control,
    *,
    has_worked: bool,
    has_claimed: bool,
    lasts_s: float,
    lease_ttl_s: float,
) -> bool:
    """Whether a node that etcd refuses a leader's requests will never be permitted them: then its
    role is wrong, and is not just being edited.

    At once if the lead came with the node's arrival (it has not ``has_claimed`` another), else if
    the refusal ``lasts_s`` for long; never if it ``has_worked`` before, or once there was a round.
    """
    if has_worked or member.epoch or control.formed is not None:
        return False
    return not has_claimed or lasts_s > _TTLS_OF_AN_EDIT * lease_ttl_s
