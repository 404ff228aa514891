"""Faults of nodes and of their way to etcd: crashes, pauses, cuts, late messages, clocks."""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdError,
    EtcdPermissionError,
    EtcdTlsError,
)
from rdzv_etcd.node.accuse import put_accusation, read_place
from rdzv_etcd.protocol.member import Phase
from rdzv_etcd.protocol.model import Accusation
from rdzv_etcd.testing.model import Request
from rdzv_etcd.testing.network import Match
from tests.sim.commits import OPERATOR
from tests.sim.matching import touches
from tests.sim.stage import SLOWEST_STOP_S, Part
from tests.sim.world import SimNode
from tests.support.machines import MachineClock


class NodeFaults(Part):
    """Each public method is one fault, begun now; what it undoes, it undoes beside."""

    def crash(self) -> None:
        for node in self._stage.some():
            self._job.crash(node.name)

    def leave(self) -> None:
        for node in self._stage.some():
            self._stage.later(self._job.leave(node.name))

    def cut_one(self) -> None:
        for node in self._stage.some():
            self._stage.later(self.cut(node, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    def cut_all(self) -> None:
        duration_s = self._rng.uniform(0, 3 * self._plan.ttl_s)
        for node in self._stage.alive():
            self._stage.later(self.cut(node, duration_s + self._rng.random()))

    async def cut(self, node: SimNode, duration_s: float) -> None:
        node.connection.link.partition(silent=self._rng.random() < 0.5)
        await asyncio.sleep(duration_s)
        if not node.crashed:
            node.connection.link.heal()

    def lose_messages(self) -> None:
        for node in self._stage.some():
            node.connection.link.lose(self._rng.choice([0, 0.1, 0.3]), self._rng.choice([0, 0.2]))

    def lose_a_reply(self) -> None:
        for node in self._stage.alive():
            link = node.connection.link
            self._rng.choice([link.drop_replies, link.drop_requests])(self._rng.randint(1, 2))

    def crash_leader(self) -> None:
        for node in self._stage.leader():
            self._job.crash(node.name)

    def cut_leader(self) -> None:
        for node in self._stage.leader():
            self._stage.later(self.cut(node, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    def freeze_leader(self) -> None:
        for node in self._stage.leader():
            self._stage.later(self._frozen(node))

    def cut_a_subset(self) -> None:
        duration_s = self._rng.uniform(0, 4 * self._plan.ttl_s)
        for node in self._stage.alive():
            if self._rng.random() < 0.5:
                self._stage.later(self.cut(node, duration_s + self._rng.random()))

    def hold_messages(self) -> None:
        """Requests arrive late, perhaps after their copies, or after their sender gave up."""
        for node in self._stage.some():
            delay_s = self._rng.choice([0.5, 6.0, 30.0])
            node.connection.link.hold_requests(delay_s, self._rng.randint(1, 3))

    def jump_clocks(self) -> None:
        self._job.history.clocks_are_wrong = True
        for node in self._stage.some():
            clock = node.node.context.clock
            assert isinstance(clock, MachineClock)
            clock.wall_skew_s = self._rng.uniform(-3600, 3600)
            if self._rng.random() < 0.5:
                ahead_s = self._rng.choice([1.0, self._plan.ttl_s, 100.0])
                clock.jump(ahead_s)
                self._job.history.note_jump(ahead_s)

    def slow(self) -> None:
        for node in self._stage.some():
            node.connection.link.delay(0.0, self._rng.choice([0.001, 0.1, 2.0]))

    def freeze(self) -> None:
        for node in self._stage.some():
            self._stage.later(self._frozen(node))

    def stall(self) -> None:
        """Stopped between two lines of its code, be it between a view and the decision on it."""
        for node in self._stage.some():
            clock = node.node.context.clock
            assert isinstance(clock, MachineClock)
            clock.stall(self._rng.randint(1, 100), self._rng.uniform(0, 3 * self._plan.ttl_s))

    async def _frozen(self, node: SimNode) -> None:
        self._job.pause(node.name)
        await asyncio.sleep(self._rng.uniform(0, 3 * self._plan.ttl_s))
        self._job.resume(node.name)

    def suspend(self) -> None:
        """A machine is suspended, unlike a process that is stopped with its timers."""
        for node in self._stage.some():
            self._stage.later(self._suspended(node, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    def suspend_together(self) -> None:
        """All machines are suspended, and wake up one after the other; mostly in time for their
        leases."""
        nodes = self._stage.alive()
        self._rng.shuffle(nodes)
        duration_s = self._rng.uniform(0, 1.5 * self._plan.ttl_s)
        for node in sorted(nodes, key=lambda node: not node.node.leads):
            self._stage.later(self._suspended(node, duration_s))
            duration_s += self._rng.uniform(0, 2.0)

    async def _suspended(self, node: SimNode, duration_s: float) -> None:
        self._job.suspend(node.name)
        await asyncio.sleep(duration_s)
        self._job.wake(node.name)

    def worker_fails(self) -> None:
        """The agent joins again by itself."""
        for node in self._stage.some():
            if node.world is not None and node.node.phase is Phase.MEMBER and node.agent:
                self._stage.later(self._rejoin(node))

    async def _rejoin(self, node: SimNode) -> None:
        assert node.agent is not None
        node.agent.cancel()
        if node.alive and node.world is not None:
            node.agent = self._job.on(node, node.run())

    def lag_watches(self) -> None:
        """Changes are told seconds later than reads would show them."""
        for node in self._stage.alive():
            if self._rng.random() < 0.5:
                self._stage.later(self._lagging(node))

    async def _lagging(self, node: SimNode) -> None:
        node.connection.link.lag_watches(self._rng.choice([0.3, 2.0, 8.0]))
        await asyncio.sleep(self._rng.uniform(0, 5 * self._plan.ttl_s))
        node.connection.link.lag_watches(0)

    def stall_control(self) -> None:
        """A node hears nothing of the control keys any more, and nobody tells it so."""
        for node in self._stage.some():
            self._stall(node, self._job.keys.control.start)

    def stall_nodes(self) -> None:
        """The same of the presences, which the leader watches."""
        for node in self._stage.leader() or self._stage.some():
            self._stall(node, self._job.keys.nodes.start)

    def stall_presence(self) -> None:
        """The same of its own presence."""
        for node in self._stage.some():
            self._stall(node, self._job.keys.node(node.node_id))

    def _stall(self, node: SimNode, start: bytes) -> None:
        node.connection.link.stall_watches(lambda key, _end: key == start)

    def hang_member(self) -> None:
        """A member of etcd gets through no write to its disk, and answers nobody it serves."""
        for node in self._stage.leader() if self._rng.random() < 0.5 else self._stage.some():
            node.connection.link.hang()

    def cut_for_long(self) -> None:
        """A node is cut off for longer than the marker of a closed job stays."""
        for node in self._stage.one():
            extra_s = self._rng.uniform(0, 3 * self._plan.ttl_s)
            self._stage.later(self.cut(node, min(self._plan.timing.closed_ttl_s, 60) + extra_s))

    def repeat_late(self) -> None:
        """What may be sent twice is applied twice, the second time late."""
        for node in self._stage.some():
            delay_s = self._rng.choice([0.3, 3.0, 20.0, 60.0])
            node.connection.link.repeat_requests(delay_s, self._rng.randint(1, 10))

    def stop_slowly(self) -> None:
        """Drawn as a kind; here the agents change how long their workers need to stop."""
        for node in self._stage.alive():
            node.stops_in_s = self._rng.choice([0.0, self._rng.uniform(0, SLOWEST_STOP_S)])

    def refuse_a_return(self) -> None:
        """etcd refuses a few nodes for a few seconds, while they have to join again."""
        kind = self._rng.choice([EtcdPermissionError, EtcdAuthError, EtcdTlsError])
        for node in self._stage.some():
            self._stage.later(self._refused(node, kind))
        self.worker_fails()

    async def _refused(self, node: SimNode, kind: type[EtcdError]) -> None:
        node.connection.link.refuse(lambda: kind("refused by the simulation"))
        await asyncio.sleep(self._rng.uniform(0, 5.0))
        node.connection.link.refuse(None)

    def evict(self) -> None:
        """An operator takes members for dead, of which some live, and others come back."""
        members = self._job.members_now()
        if not members:
            return
        about = self._rng.choice(members)
        if self._rng.random() < 0.5:
            self._stage.later(self._frozen(about))
        self._stage.later(self._evicted(about.node_id, certain=self._rng.random() < 0.5))

    async def _evicted(self, node_id: str, *, certain: bool) -> None:
        keys, etcd = self._job.keys, self._job.server.connect(OPERATOR)
        accusation = Accusation(OPERATOR, "evicted by the simulation", certain)
        with contextlib.suppress(EtcdError):
            lease = await etcd.grant(60)
            presence = (await read_place(etcd, keys, node_id)).presence
            if presence is not None:
                await put_accusation(etcd, keys, presence[0], accusation, lease.lease_id)
            await asyncio.sleep(self._rng.uniform(0, 3 * self._plan.ttl_s))
            await etcd.revoke(lease.lease_id)
        await etcd.close()

    def die_at_work(self) -> None:
        """A node's last act is something in its world's store, or at a barrier."""
        for node in self._stage.one():
            within_s = self._rng.uniform(0, 0.006)
            node.connection.link.hold_requests(0.001, 1, self._last_act(node, within_s))

    def _last_act(self, node: SimNode, within_s: float) -> Match:
        keys = self._job.keys

        def matching(request: Request) -> bool:
            if (
                self._stage.calm
                or not node.alive
                or not touches(request, keys.stores, keys.barriers)
            ):
                return False
            self._stage.later(self._dying(node, within_s))
            return True

        return matching

    async def _dying(self, node: SimNode, within_s: float) -> None:
        await asyncio.sleep(within_s)
        if node.alive:
            self._job.crash(node.name)

    def finish_early(self) -> None:
        """A member's workers finish before the others'."""
        members = self._job.members_now()
        if len(members) > 1:
            self._stage.later(self._job.finish_early(self._rng.choice(members).name))

    def start_a_stranger(self) -> None:
        self._stage.stranger()
