"""Faults of etcd: restarts, losses of data, compactions, leases that end, no space."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.sim.faults_nodes import NodeFaults
from tests.sim.stage import Part, Stage


class EtcdFaults(Part):
    """Each public method is one fault, begun now; what it undoes, it undoes beside."""

    def __init__(self, stage: Stage, nodes: NodeFaults) -> None:
        super().__init__(stage)
        self._nodes = nodes

    def restart_etcd(self) -> None:
        if self._job.server.up:
            self._job.server.restart(self._rng.choice([0.1, 2.0, 30.0]))

    def wipe(self) -> None:
        self._stage.forget_asked()
        self._job.wipe()

    def compact(self) -> None:
        server = self._job.server
        if server.revision > server.model.compact_revision:
            server.compact()

    def expire(self) -> None:
        leases = sorted(self._job.server.leases())
        if leases and self._job.server.up:
            lease = self._rng.choice(leases)
            drains = self._job.server.snapshot(self._job.keys.drains.start)
            if any(kv.lease_id == lease for kv in drains):
                self._stage.forget_asked()
            self._job.revoke([lease])

    def expire_leader(self) -> None:
        for node in self._stage.leader():
            lease_id = node.node.context.session.lease_id
            if lease_id in self._job.server.leases() and self._job.server.up:
                self._job.server.expire(lease_id)

    def expire_job(self) -> None:
        for formed in self._job.history.formed[-1:]:
            if formed.record.job_lease in self._job.server.leases() and self._job.server.up:
                self._job.server.expire(formed.record.job_lease)
                self._job.history.lose()

    def compact_behind_a_cut(self) -> None:
        self._nodes.cut_a_subset()
        self._stage.later(self._compactions(1, self._rng.uniform(0, self._plan.ttl_s)))

    def compact_all_the_time(self) -> None:
        self._stage.later(self._compactions(self._rng.randint(1, 40), 1.0))

    async def _compactions(self, times: int, pause_s: float) -> None:
        for _ in range(times):
            await asyncio.sleep(pause_s)
            self.compact()

    def run_out_of_space(self) -> None:
        duration_s = self._rng.uniform(0, 8 * self._plan.ttl_s)
        self._stage.later(self._for_a_while(self._job.server.set_no_space, duration_s))

    def overload(self) -> None:
        """No lease is renewed for a while, of nobody; what else is asked for is done."""
        duration_s = self._rng.uniform(0, 4 * self._plan.ttl_s)
        self._stage.later(self._for_a_while(self._job.server.set_overloaded, duration_s))

    async def _for_a_while(self, switch: Callable[[bool], None], duration_s: float) -> None:
        switch(True)
        await asyncio.sleep(duration_s)
        switch(False)
