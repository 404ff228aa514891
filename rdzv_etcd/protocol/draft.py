"""Drafts the record that a leader writes when it closes a round, and the audit of that. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import islice

from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Control, NodeInfo, Nodes, Round, Ttls
from rdzv_etcd.protocol.ranks import slices_for
from rdzv_etcd.protocol.world_end import losses
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.fields import MAX_EPOCH_CLAIM
from rdzv_etcd.text import shown

_AUDITED = 32
"""Nodes that are named in an audit, of each kind."""


def next_record(
    member: Member,
    control: Control,
    nodes: Nodes,
    decision: Close,
    settings: Settings,
    *,
    run: str,
    highest_epoch: int,
    job_lease: int,
    lease_ttl_s: int,
) -> Round:
    """Draft the record of the round to be formed; ``run``: its name by :func:`keeps_name`,
    ``highest_epoch``: that known, ``lease_ttl_s``: that of the leader's own lease."""
    formed = control.formed
    master = decision.world[0]
    origin = _origin(member, control, run)
    edition = f"{run}.{control.leader_revision:x}.{nodes.revision:x}"
    slices = slices_for(len(decision.world), settings.slice_nodes, edition)
    ttls_s = [node.lease_ttl_s or lease_ttl_s for node in decision.world]
    return Round(
        number=control.next_number,
        run=run,
        members=() if slices is not None else tuple(node.node_id for node in decision.world),
        settings=settings.job if formed is None else formed.settings,
        master_address=master.address,
        master_port=master.port,
        job_lease=job_lease if formed is None else formed.job_lease,
        epoch_base=epoch_base(control, decision.world, highest_epoch),
        expelled=decision.expelled + decision.finished,  # neither asks for a seat
        slices=slices,
        heirs=decision.heirs,
        began_as=None if origin == run else origin,
        lease_ttls_s=Ttls(min(ttls_s), max(ttls_s)),
        domains=decision.domains,
    )


def highest_known_epoch(member: Member, control: Control, nodes: Nodes, epoch_floor: int) -> int:
    """Return the highest epoch that any node knows of, as far as it can be believed."""
    claims = (presence.info.epoch_seen for presence in nodes.present.values())
    return max(
        control.epoch,
        member.epoch_seen,
        epoch_floor,
        *(run.epoch for run in control.ended),
        *(claim for claim in claims if claim <= MAX_EPOCH_CLAIM),
    )


def epoch_base(control: Control, world: Sequence[NodeInfo], highest: int) -> int:
    """Return the base to which revisions are added, so that epochs only grow.

    Revisions begin again after a loss of data, and an embedded etcd is a new one in every run:
    where all nodes are new, none may be left that knows of an epoch. Theirs is therefore not less
    than the time, by the lower median of their clocks: one that is wrong does not decide. If most
    were wrong in an earlier run, etcd remembers the resulting base. A node that has trained counts
    from the epoch that it knows: by the clock an older world that is back would look like the
    latest.
    """
    before = control.round
    clocks = sorted(node.clock_us for node in world)
    if clocks[0]:
        agreed_us = clocks[(len(clocks) - 1) // 2]
        highest = max(highest, min(agreed_us, MAX_EPOCH_CLAIM))
    base = max(control.epoch_base, 0 if before is None else before.epoch_base)
    if base + max(control.revision, control.round_revision) < highest:
        return highest
    return base


def keeps_name(member: Member, control: Control, name: str | None, highest: int) -> bool:
    """Whether the next round belongs to the run that this leader has named: every leader gives
    names of its own, and a new one if it cannot know whether later rounds than the last have had
    the next number.

    That is so if the record is older than an epoch that some node has seen (``highest``), or was
    put back, or if etcd has gone back, or gave no answer: so run and number name a round once,
    whatever etcd forgets.
    """
    formed = control.formed
    return (
        formed is not None
        and formed.run == name
        and formed.epoch_fixed is None
        and highest <= control.epoch
        and control.round_revision != member.restored_revision
    )


def _origin(member: Member, control: Control, run: str) -> str:
    """Return which run continues, under whatever name: that of the last round, if there is any; or,
    if its record was lost while all waited, the one that this node was in."""
    if control.formed is not None:
        return control.formed.origin
    mine = member.origin
    continues = control.round is None and mine is not None and control.end_of(mine) is None
    return mine if mine is not None and continues else run


def audit(
    control: Control,
    nodes: Nodes,
    record: Round,
    decision: Close,
    *,
    closed_by: str,
    now_s: float,
    wall_s: float,
    opened_s: float,
) -> dict[str, object]:
    """Describe how the round came about, for people; ``opened_s``: since when it could be closed,
    as the change was there."""
    change = control.open_change
    arrivals = [nodes.present[node.node_id] for node in decision.world]
    last = max(arrivals, key=lambda presence: presence.seen_s)
    if len(arrivals) > _AUDITED:  # the audit of a large world is about its slowest nodes
        arrivals = nlargest(_AUDITED, arrivals, key=lambda presence: presence.seen_s)
    waited = [[presence.info.node_id, round(now_s - presence.seen_s, 3)] for presence in arrivals]
    return {
        "round": record.number,
        "run": record.run,
        "wall_s": round(wall_s, 3),  # shown to people, never compared
        "closed_by": closed_by,
        "because": shown(decision.reason),
        "open_s": round(now_s - opened_s, 3),
        "size": record.size,
        "waited_s": waited,
        "last_arrival": last.info.node_id,
        "last_arrival_after_s": round(max(0.0, last.seen_s - opened_s), 3),
        "expelled": list(decision.expelled[:_AUDITED]),
        "came_back": _why_back(decision, change),
        "change": None if change is None else _audited(change, losses(change, nodes, opened_s)),
    }


def _audited(change: Change, lost_s: Mapping[str, float | None]) -> dict[str, object]:
    after_s = {node: round(after_s, 3) for node, after_s in lost_s.items() if after_s is not None}
    return {
        "waiters": list(change.waiters),
        "lost": dict(change.lost),
        "lost_after_s": after_s,
        "unnamed": change.unnamed,
    }


def _why_back(decision: Close, change: Change | None) -> dict[str, str]:
    """Return why members rejoined that gave a reason: first those that ended the round before; a
    failure elsewhere may have made the others fail."""
    ended = {} if change is None else change.because
    others = {
        node.node_id: shown(node.because)
        for node in decision.world
        if node.because and node.node_id not in ended
    }
    return dict(islice({**ended, **others}.items(), _AUDITED))
