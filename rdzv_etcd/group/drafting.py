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

_AUDITED = 32


class Drafting:
    """Remembers how many runs this node has named."""

    def __init__(self, context: NodeContext, standing: Standing, job_lease: JobLease) -> None:
        self._context = context
        self._standing = standing
        self._job_lease = job_lease
        self._runs = 0

    async def next_record(self, control: Control, nodes: Nodes, decision: Close) -> Round:
        """Draft the record of the round to be formed. Raises EtcdError."""
        before, formed = control.round, control.formed
        epoch_base = self._first_epoch_base() if before is None else before.epoch_base
        seen = (presence.info.epoch_seen for presence in nodes.present.values())
        highest = max(control.epoch, self._standing.epoch_seen, *seen)
        if epoch_base + max(control.revision, control.round_revision) < highest:
            # Revisions began anew after a loss of data; epochs only grow.
            epoch_base = highest
        master, run = decision.world[0], self._run_after(formed)
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

    def _first_epoch_base(self) -> int:
        """An embedded etcd is new for every run, so its revisions alone would begin anew, and a
        checkpoint of the last run would look newer than all of this one: count on from the time."""
        if not self._context.settings.embed:
            return 0
        return int(self._context.clock.wall_s() * 1_000_000)

    def _origin(self, control: Control, run: str) -> str:
        """Say which run goes on, under whatever name: that of the last round, if there is any; or,
        if its record was lost while all waited, the one that this node was in."""
        if control.formed is not None:
            return control.formed.origin
        mine = self._standing.origin
        goes_on = control.round is None and mine is not None and control.end_of(mine) is None
        return mine if mine is not None and goes_on else run

    def _run_after(self, formed: Round | None) -> str:
        """Name the run of the next round: a new one, never named before, unless the last round's
        goes on.

        It does not if its record was put back: that may have been done by who had been cut off and
        did not know of later rounds, whose numbers must not be given out again.
        """
        if formed is not None and formed.epoch_fixed is None:
            return formed.run
        self._runs += 1
        seed = self._context.identity.run_seed
        return seed if self._runs == 1 else f"{seed}.{self._runs}"

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
