"""Faults that wait for the moment in which they matter: between a decision and its commit.

Such moments last milliseconds; a fault drawn at any time seldom meets one. Each fault here lies in
wait for a certain request of a certain node. Knows the protocol's requests; judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv_etcd.errors import EtcdAuthError, EtcdError, EtcdPermissionError
from rdzv_etcd.testing.model import Request
from tests.sim.matching import puts
from tests.sim.stage import Part, Stage
from tests.sim.world import SimNode

Then = Callable[[SimNode], None]

LATE_S = (0.5, 3.0, 12.0)
SLOW_AGENT_S = 45.0


class Aimed(Part):
    """Lays the traps of one life."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._over = False

    def faults(self) -> list[Callable[[], None]]:
        return [
            self._somebody_arrives_in_a_close,
            self._the_lead_is_lost_in_a_close,
            self._the_lead_is_lost_in_a_change,
            self._a_change_is_decided_long_ago,
            self._a_return_takes_long,
            self._agents_are_slow,
            self._refuse,
        ]

    def enough(self) -> None:
        """Let no trap close any more."""
        self._over = True

    # -- traps ----------------------------------------------------------------------------------

    def _somebody_arrives_in_a_close(self) -> None:
        self._trap(self._job.keys.round, lambda _node: self._stage.newcomer(), stalled=False)

    def _the_lead_is_lost_in_a_close(self) -> None:
        self._trap(self._job.keys.round, self._expire, stalled=self._rng.random() < 0.5)

    def _the_lead_is_lost_in_a_change(self) -> None:
        self._trap(self._job.keys.change, self._expire, stalled=self._rng.random() < 0.5)

    def _a_change_is_decided_long_ago(self) -> None:
        self._trap(self._job.keys.change, lambda _node: None, stalled=True)

    def _a_return_takes_long(self) -> None:
        """Of a member that has lost its lease; whoever led may be gone meanwhile, too."""
        for node in self._stage.one():
            leaders = [each for each in self._stage.alive() if each.node.leads and each is not node]
            self._lie_in_wait(node, self._job.keys.node(node.node_id), lambda _node: None, False, 3)
            self._expire(node)
            if leaders and self._rng.random() < 0.7:
                self._job.crash(leaders[0].name)

    def _agents_are_slow(self) -> None:
        """Who needs longer than the others wait is left out, though it lives."""
        for node in self._stage.alive():
            node.stops_in_s = self._rng.choice([0.0, self._rng.uniform(0, SLOW_AGENT_S)])

    def _refuse(self) -> None:
        """etcd refuses some nodes, as after a change of roles or passwords, for a while."""
        for node in self._stage.alive():
            if self._rng.random() < 0.4:
                kind = self._rng.choice([EtcdPermissionError, EtcdAuthError])
                self._stage.later(self._refused(node, kind))

    async def _refused(self, node: SimNode, kind: type[EtcdError]) -> None:
        node.connection.link.refuse(lambda: kind("refused by the simulation"))
        await asyncio.sleep(self._rng.uniform(0, 3 * self._plan.ttl_s))
        node.connection.link.refuse(None)

    def delay_the_end(self, node: SimNode) -> None:
        """Let a node close its job late, and meanwhile, perhaps, the others go on without one."""
        others = [each for each in self._stage.alive() if each is not node]
        if others and self._rng.random() < 0.5:
            self._lie_in_wait(node, self._job.keys.round, lambda _node: None, True, 1)
            other = self._rng.choice(others)
            if self._rng.random() < 0.5:
                self._expire(other)
            else:
                self._job.crash(other.name)

    # -- how a trap works -------------------------------------------------------------------------

    def _trap(self, key: bytes, then: Then, *, stalled: bool) -> None:
        """Whoever puts ``key`` next does it late, and ``then`` happens meanwhile."""
        for node in self._stage.alive():
            self._lie_in_wait(node, key, then, stalled, 1)

    def _lie_in_wait(
        self, node: SimNode, key: bytes, then: Then, stalled: bool, count: int
    ) -> None:
        link, delay_s = node.connection.link, self._rng.choice(LATE_S)
        sprung = False

        def matching(request: Request) -> bool:
            nonlocal sprung
            if self._over or not node.alive or not puts(key)(request):
                return False
            if not sprung:
                sprung = True
                after_s = self._rng.uniform(0, min(delay_s, 1.0))
                self._stage.later(self._spring(node, then, after_s))
            return True

        (link.stall_requests if stalled else link.hold_requests)(delay_s, count, matching)

    async def _spring(self, node: SimNode, then: Then, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        then(node)

    def _expire(self, node: SimNode) -> None:
        lease_id, server = node.node.context.session.lease_id, self._job.server
        if server.up and lease_id in server.leases():
            server.expire(lease_id)
