"""Decides what a leader does next: publish that the round is over, close the next one, or wait.

The parts are :mod:`rdzv_etcd.protocol.changes` and :mod:`rdzv_etcd.protocol.closing`; here stands
when which of them applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_etcd.protocol.accusations import doubted
from rdzv_etcd.protocol.changes import Healthy, Publish, decide_change
from rdzv_etcd.protocol.closing import Close, KeepWaiting, RoundLimits, decide_close
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Control, Nodes
from rdzv_etcd.settings import Settings


@dataclass(frozen=True, slots=True)
class Times:
    """What a leader reads from its clock."""

    now_s: float
    in_contact_since_s: float
    """Since when it has been in contact with etcd."""
    trust_absence_s: float
    """From when on it may believe that a member without presence is gone."""
    incomplete_since_s: float
    """Since when it leads a world of which it does not know all members."""
    lease_ttl_s: float
    """The longest TTL of the leases in its world."""
    round_trip_s: float = 0.0
    """How long etcd took to answer last."""


LeaderStep = Publish | Close | Healthy | KeepWaiting

_TTLS_OF_AN_EDIT = 3
"""How long a role may lack something while it is edited."""


def leader_step(
    member: Member,
    control: Control,
    nodes: Nodes,
    settings: Settings,
    times: Times,
) -> LeaderStep:
    """Say what the leader does next; ``settings`` are those that it was started with."""
    nodes = doubted(nodes, member.doubted_revision)
    change = decide_change(
        control,
        nodes,
        times.now_s,
        trust_absence_s=times.trust_absence_s,
        round_trip_s=times.round_trip_s,
        unknown_until_s=times.incomplete_since_s + settings.timing.rejoin_timeout_s,
    )
    if isinstance(change, Publish) or not _is_open(member, control):
        return change
    closing = _closing_step(member, control, nodes, settings, times)
    if isinstance(closing, KeepWaiting) and change.until_s is not None:
        until_s = (
            change.until_s if closing.until_s is None else min(change.until_s, closing.until_s)
        )
        return KeepWaiting(until_s, closing.reason)
    return closing


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
    limits = RoundLimits(
        timing.last_call_timeout_s,
        timing.settle_s,
        timing.rejoin_timeout_s,
        max(
            member.arrivable_s, times.in_contact_since_s
        ),  # it does not begin again with each leader
        member.closes_by_s,
        times.round_trip_s,
    )
    agreed = settings.job if formed is None else formed.settings
    return decide_close(control, nodes, agreed, limits, times.now_s)


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


def is_unfit_to_lead(
    member: Member,
    control: Control,
    *,
    has_worked: bool,
    has_claimed: bool,
    lasts_s: float,
    lease_ttl_s: float,
) -> bool:
    """Whether a node that is refused what a leader does never may do it: then its role is wrong,
    and is not just being edited.

    At once if the lead came with the node's arrival (it has not ``has_claimed`` another), else if
    that ``lasts_s`` for long; never if it ``has_worked`` before, or once there was a round.
    """
    if has_worked or member.epoch or control.formed is not None:
        return False
    return not has_claimed or lasts_s > _TTLS_OF_AN_EDIT * lease_ttl_s
