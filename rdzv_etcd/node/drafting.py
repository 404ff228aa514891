"""Drafts what a leader writes when it closes a round: the record, and how it came about.

Decides nothing, and writes nothing but the leases that its drafts need; see
:mod:`rdzv_etcd.node.lead`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from heapq import nlargest
from itertools import islice

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.port import LeaseGrant
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.describe import refused_lately
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Control, Nodes, Round
from rdzv_etcd.protocol.ranks import slices_for
from rdzv_etcd.protocol.world_end import MemberLoss
from rdzv_etcd.settings.fields import MAX_EPOCH_CLAIM
from rdzv_etcd.text import shown

_AUDITED = 32
"""Nodes that are named in an audit, of each kind."""


class Drafting:
    """Remembers the name that this node has given to the run, and the leases prepared for it.

    Tell it what became of each draft: :meth:`written`, :meth:`in_doubt` or :meth:`lease_lost`; a
    draft that was refused is simply not used.
    """

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        timing = context.settings.timing
        self._job_lease = PreparedLease(context, timing.job_ttl_s)
        self._epoch_lease = PreparedLease(context, timing.ended_ttl_s)
        self._name: str | None = None
        self._names_given = 0

    def prepare(self, control: Control) -> None:
        """Begin to grant what round 1 needs, so that it is not on its path."""
        if control.formed is not None:
            return
        self._job_lease.begin()
        if not (self._context.settings.embed or control.epoch_lease):
            self._epoch_lease.begin()

    def written(self, *, with_epoch: bool) -> None:
        """Note that the last draft is in etcd; ``with_epoch``: what its epoch counts from, too."""
        self._job_lease.given_away()
        if with_epoch:
            self._epoch_lease.given_away()

    def in_doubt(self) -> None:
        """Note that a round may have been formed as drafted, or not: if etcd has forgotten it
        since, some may know it all the same."""
        self._job_lease.in_doubt()
        self._epoch_lease.in_doubt()
        self._name = None

    async def lease_lost(self) -> None:
        """Note that etcd does not know one of a draft's leases: then what lived on it is gone."""
        self._job_lease.given_away()
        await self._epoch_lease.drop()

    async def drop(self) -> None:
        """Revoke leases that no round uses. If this is cancelled, call it again."""
        await self._job_lease.drop()
        await self._epoch_lease.drop()

    async def next_record(self, control: Control, nodes: Nodes, decision: Close) -> Round:
        """Draft the record of the round to be formed. Raises EtcdError."""
        formed = control.formed
        highest = self._highest_epoch(control, nodes)
        epoch_base = self._epoch_base(control, decision, highest)
        master, run = decision.world[0], self._run_after(control, highest)
        origin = self._origin(control, run)
        edition = f"{run}.{control.leader_revision:x}.{nodes.revision:x}"
        slices = slices_for(len(decision.world), self._context.settings.slice_nodes, edition)
        members = tuple(node.node_id for node in decision.world)
        own_s = self._context.session.ttl_s
        ttls_s = [node.lease_ttl_s or own_s for node in decision.world]
        return Round(
            number=control.next_number,
            run=run,
            members=members if slices is None else (),
            settings=self._context.settings.job if formed is None else formed.settings,
            master_address=master.address,
            master_port=master.port,
            job_lease=formed.job_lease if formed is not None else await self._job_lease.get(),
            epoch_base=epoch_base,
            expelled=decision.expelled + decision.finished,  # neither asks for a seat
            slices=slices,
            heirs=decision.heirs,
            began_as=None if origin == run else origin,
            lease_ttls_s=(min(ttls_s), max(ttls_s)),
        )

    async def epoch_lease(self, control: Control, record: Round) -> int:
        """Return the lease on which to remember what the record's epoch counts from, 0 if that is
        remembered. An embedded etcd ends with its run, and its memory with it. Raises EtcdError."""
        if self._context.settings.embed or record.epoch_base <= control.epoch_base:
            return 0
        return control.epoch_lease or await self._epoch_lease.get()

    def _highest_epoch(self, control: Control, nodes: Nodes) -> int:
        """Return the highest epoch that anybody knows of, as far as it can be believed."""
        claims = (presence.info.epoch_seen for presence in nodes.present.values())
        return max(
            control.epoch,
            self._member.epoch_seen,
            self._context.settings.epoch_floor,
            *(run.epoch for run in control.ended),
            *(claim for claim in claims if claim <= MAX_EPOCH_CLAIM),
        )

    def _epoch_base(self, control: Control, decision: Close, highest: int) -> int:
        """Return what revisions are counted on top of, so that epochs only grow.

        Revisions begin again after a loss of data, and an embedded etcd is a new one in every run:
        where all are new, nobody may be left who knows of an epoch. Theirs is therefore not less
        than the time, by the lower median of their clocks: one that is wrong does not decide. If
        most were wrong in an earlier run, etcd remembers what that led to. Who has trained counts
        on from what it knows: by the clock an older world that is back would look like the latest.
        """
        before = control.round
        clocks = sorted(node.clock_us for node in decision.world)
        if clocks[0]:
            agreed_us = clocks[(len(clocks) - 1) // 2]
            highest = max(highest, min(agreed_us, MAX_EPOCH_CLAIM))
        base = max(control.epoch_base, 0 if before is None else before.epoch_base)
        if base + max(control.revision, control.round_revision) < highest:
            return highest
        return base

    def _origin(self, control: Control, run: str) -> str:
        """Say which run goes on, under whatever name: that of the last round, if there is any; or,
        if its record was lost while all waited, the one that this node was in."""
        if control.formed is not None:
            return control.formed.origin
        mine = self._member.origin
        goes_on = control.round is None and mine is not None and control.end_of(mine) is None
        return mine if mine is not None and goes_on else run

    def _run_after(self, control: Control, highest_epoch: int) -> str:
        """Name the run of the next round: every leader gives names of its own, and a new one if it
        cannot know whether later rounds than the last have had the next number.

        That is so if the record is older than what somebody has seen, or was put back, or if etcd
        has gone back, or gave no answer: so run and number name a round once, whatever etcd
        forgets.
        """
        formed = control.formed
        if (
            formed is not None
            and formed.run == self._name
            and formed.epoch_fixed is None
            and highest_epoch <= control.epoch
            and control.round_revision != self._member.restored_revision
        ):
            return formed.run
        self._names_given += 1
        seed = self._context.identity.run_seed
        self._name = seed if self._names_given == 1 else f"{seed}.{self._names_given}"
        return self._name

    def audit(
        self,
        control: Control,
        nodes: Nodes,
        record: Round,
        decision: Close,
        *,
        opened_s: float,
        losses: Sequence[MemberLoss],
    ) -> dict[str, object]:
        """Say how the round came about, for people; ``opened_s``: since when it could be closed;
        ``losses``: those of the change, if this node has published it."""
        now_s = self._context.clock.now_s()
        change = control.open_change
        arrivals = [nodes.present[node.node_id] for node in decision.world]
        last = max(arrivals, key=lambda presence: presence.seen_s)
        if len(arrivals) > _AUDITED:  # the audit of a large world is about its slowest nodes
            arrivals = nlargest(_AUDITED, arrivals, key=lambda presence: presence.seen_s)
        waited = [
            [presence.info.node_id, round(now_s - presence.seen_s, 3)] for presence in arrivals
        ]
        open_s = now_s - opened_s
        return {
            "round": record.number,
            "run": record.run,
            "wall_s": round(self._context.clock.wall_s(), 3),  # shown to people, never compared
            "closed_by": self._context.identity.node_id,
            "because": shown(decision.reason),
            "open_s": round(open_s, 3),
            "size": record.size,
            "waited_s": waited,
            "last_arrival": last.info.node_id,
            "last_arrival_after_s": round(max(0.0, last.seen_s - opened_s), 3),
            "expelled": list(decision.expelled[:_AUDITED]),
            "refused": _refused(control, record),
            "came_back": _why_back(decision, change),
            "change": None if change is None else _audited(change, losses),
        }


def _refused(control: Control, record: Round) -> dict[str, object] | None:
    """Which node could not join lately, and why."""
    refused = refused_lately(control, record.settings)
    if refused is None:
        return None
    why = shown(refused.why)
    return {"node": refused.node_id, "why": why, "wall_s": round(refused.wall_s, 3)}


def _audited(change: Change, losses: Sequence[MemberLoss]) -> dict[str, object]:
    after_s = {
        loss.node_id: round(loss.after_s, 3)
        for loss in losses
        if loss.after_s is not None and loss.node_id in change.lost
    }
    return {
        "waiters": list(change.waiters),
        "lost": dict(change.lost),
        "lost_after_s": after_s,
        "unnamed": change.unnamed,
    }


def _why_back(decision: Close, change: Change | None) -> dict[str, str]:
    """Why members came back that said so: first those that ended the round before, which a failure
    elsewhere may have made fail as well."""
    ended = {} if change is None else change.because
    others = {
        node.node_id: shown(node.because)
        for node in decision.world
        if node.because and node.node_id not in ended
    }
    return dict(islice({**ended, **others}.items(), _AUDITED))


class PreparedLease:
    """A lease of ``ttl_s`` that the leader grants ahead and gives to the first round it forms."""

    def __init__(self, context: NodeContext, ttl_s: int) -> None:
        self._context = context
        self._ttl_s = ttl_s
        self._granting: asyncio.Task[LeaseGrant] | None = None
        self._renewed_s = 0.0
        self._is_in_doubt = False

    def begin(self) -> asyncio.Task[LeaseGrant]:
        """Begin to grant the lease, unless that is under way or done."""
        granting = self._granting
        if granting is None or (granting.done() and granting.exception() is not None):
            context = self._context
            self._forget()
            self._renewed_s = context.clock.now_s()
            granting = asyncio.ensure_future(
                context.etcd.grant(self._ttl_s, timeout_s=context.urgent_limit_s)
            )
            granting.add_done_callback(_look_at)
            self._granting = granting
        return granting

    async def get(self) -> int:
        """Return its id; renew it first if the wait for the first round was long.

        Raises EtcdError.
        """
        lease_id = (await asyncio.shield(self.begin())).lease_id
        context = self._context
        now_s = context.clock.now_s()
        if now_s - self._renewed_s > self._ttl_s / 3:
            if not await context.etcd.keep_alive(lease_id, timeout_s=context.urgent_limit_s):
                self._forget()  # it ran out during the wait
                lease_id = (await asyncio.shield(self.begin())).lease_id
            self._renewed_s = now_s
        return lease_id

    def in_doubt(self) -> None:
        """Note that a round may use it or not: nobody knows what became of the write.

        The next attempt offers it again, so that no second lease is left behind.
        """
        self._is_in_doubt = True

    def given_away(self) -> None:
        """Note that it is a round's now, or is gone."""
        self._forget()

    async def drop(self) -> None:
        """Revoke it if no round uses it. If this is cancelled, call it again."""
        granting = self._granting
        if granting is None:
            return
        limit_s = self._context.farewell_limit_s
        if not self._is_in_doubt:  # if it is: a round may live on it, and it expires if none does
            with contextlib.suppress(EtcdError, TimeoutError):  # it expires by itself
                # Shielded: of a grant that was cut off nobody would know the id.
                grant = await self._context.clock.wait_for(asyncio.shield(granting), limit_s)
                await self._context.etcd.revoke(grant.lease_id, timeout_s=limit_s)
        if self._granting is granting:
            self._forget()

    def _forget(self) -> None:
        self._granting = None
        self._is_in_doubt = False


def _look_at(granting: asyncio.Task[LeaseGrant]) -> None:
    """Retrieve the error of a grant that nobody may wait for any more."""
    if not granting.cancelled():
        granting.exception()
