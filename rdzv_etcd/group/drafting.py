"""Drafts what a leader writes when it closes a round: the record, and how it came about.

Decides nothing and writes nothing; see :mod:`rdzv_etcd.group.leadership`.
"""

from __future__ import annotations

from heapq import nlargest

from rdzv_etcd.core.closing import Close
from rdzv_etcd.core.model import Control, Nodes, Round
from rdzv_etcd.core.slicing import slices_for
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.group.job_lease import JobLease
from rdzv_etcd.group.standing import Standing
from rdzv_etcd.settings.model import MAX_EPOCH_CLAIM

_AUDITED = 32


class Drafting:
    """Remembers the names that this node has given to runs."""

    def __init__(self, context: NodeContext, standing: Standing, job_lease: JobLease) -> None:
        self._context = context
        self._standing = standing
        self._job_lease = job_lease
        self._names: list[str] = []

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
        return Round(
            number=control.next_number,
            run=run,
            members=members if slices is None else (),
            settings=self._context.settings.job if formed is None else formed.settings,
            master_address=master.address,
            master_port=master.port,
            job_lease=formed.job_lease if formed is not None else await self._job_lease.get(),
            epoch_base=epoch_base,
            expelled=decision.expelled,
            slices=slices,
            heirs=decision.heirs,
            began_as=None if origin == run else origin,
        )

    def _highest_epoch(self, control: Control, nodes: Nodes) -> int:
        """Return the highest epoch that anybody knows of, as far as it can be believed."""
        claims = (presence.info.epoch_seen for presence in nodes.present.values())
        return max(
            control.epoch,
            self._standing.epoch_seen,
            self._context.settings.epoch_floor,
            *(run.epoch for run in control.ended),
            *(claim for claim in claims if claim <= MAX_EPOCH_CLAIM),
        )

    def _epoch_base(self, control: Control, decision: Close, highest: int) -> int:
        """Return what revisions are counted on top of, so that epochs only grow.

        Revisions begin anew after a loss of data. With an embedded etcd that is so in every run,
        and nobody may be left who knows of an epoch: the first one is not less than the time then,
        by the lower median of the nodes' clocks, so that one that is wrong does not decide. Any
        other etcd outlives its runs, and revisions cannot be wrong as clocks can.
        """
        before = control.round
        if before is None and self._context.settings.embed:
            clocks = sorted(node.clock_us for node in decision.world if node.clock_us)
            agreed_us = clocks[(len(clocks) - 1) // 2] if clocks else 0
            highest = max(highest, min(agreed_us, MAX_EPOCH_CLAIM))
        base = 0 if before is None else before.epoch_base
        if base + max(control.revision, control.round_revision) < highest:
            return highest
        return base

    def _origin(self, control: Control, run: str) -> str:
        """Say which run goes on, under whatever name: that of the last round, if there is any; or,
        if its record was lost while all waited, the one that this node was in."""
        if control.formed is not None:
            return control.formed.origin
        mine = self._standing.origin
        goes_on = control.round is None and mine is not None and control.end_of(mine) is None
        return mine if mine is not None and goes_on else run

    def _run_after(self, control: Control, highest_epoch: int) -> str:
        """Name the run of the next round: every leader gives names of its own, and a new one if it
        cannot know whether later rounds than the last have had the next number.

        That is so if the record is older than what somebody has seen, or was put back, or if etcd
        has gone back: so run and number name a round once, whatever etcd forgets.
        """
        formed = control.formed
        if (
            formed is not None
            and formed.run in self._names
            and formed.epoch_fixed is None
            and highest_epoch <= control.epoch
            and control.round_revision != self._standing.restored_revision
        ):
            return formed.run
        seed = self._context.identity.run_seed
        self._names.append(f"{seed}.{len(self._names) + 1}" if self._names else seed)
        return self._names[-1]

    def audit(
        self, control: Control, nodes: Nodes, record: Round, decision: Close, opened_s: float
    ) -> dict[str, object]:
        """Say how the round came about, for people; ``opened_s``: since when it could be closed."""
        now_s = self._context.clock.now_s()
        change = control.open_change
        arrivals = [nodes.present[node.node_id] for node in decision.world]
        last = max(arrivals, key=lambda presence: presence.seen_s)
        if record.slices is not None:  # the audit of a large world is about its slowest nodes
            arrivals = nlargest(_AUDITED, arrivals, key=lambda presence: presence.seen_s)
        waited = [
            [presence.info.node_id, round(now_s - presence.seen_s, 3)] for presence in arrivals
        ]
        open_s = now_s - opened_s
        return {
            "round": record.number,
            "run": record.run,
            "closed_by": self._context.identity.node_id,
            "because": decision.reason,
            "open_s": round(open_s, 3),
            "size": record.size,
            "waited_s": waited,
            "last_arrival": last.info.node_id,
            "last_arrival_after_s": round(max(0.0, last.seen_s - opened_s), 3),
            "expelled": list(decision.expelled),
            "change": None
            if change is None
            else {"waiters": list(change.waiters), "lost": dict(change.lost)},
        }
