"""Faults of links between nodes, and deaths that they tell of."""

from __future__ import annotations

import asyncio
from itertools import permutations

from tests.sim.stage import Part


class PeerFaults(Part):
    """Each public method is one fault, begun now; what it undoes, it undoes beside."""

    def kill_processes(self) -> None:
        """One process, or all of a host: their hosts say that they are gone."""
        count = self._rng.choice([1, 1, 2, 3])
        for node in self._stage.alive()[:count]:
            self._job.kill(node.name)

    def break_links(self) -> None:
        """All links break, between nodes that live; some of them may be far from each other."""
        switch = self._job.switch
        if switch is None:
            return
        for node in self._stage.some():
            if node.peer is not None and self._rng.random() < 0.5:
                switch.delay(node.peer.place[0], self._rng.uniform(0.0, 0.2))
        switch.reset_all()

    def refuse_links(self) -> None:
        """A firewall breaks a node's links and refuses new ones, to it or from it."""
        for node in self._stage.some():
            if self._job.switch is not None and node.peer is not None:
                refuse = self._rng.choice([self._job.switch.refuse, self._job.switch.refuse_for])
                refuse(node.peer.place[0])
                self._stage.later(self._healed_later())

    def cut_links(self) -> None:
        """Nodes cannot see each other, some only in one direction; etcd is there."""
        switch = self._job.switch
        places = [node.peer.place[0] for node in self._stage.alive() if node.peer is not None]
        for one, other in permutations(places, 2):
            if switch is not None and self._rng.random() < 0.5:
                switch.cut(one, other)
        self._stage.later(self._healed_later())

    def accept_for_the_dead(self) -> None:
        """A proxy accepts connections to a node, whether it lives or not."""
        for node in self._stage.some():
            if self._job.switch is not None and node.peer is not None:
                self._job.switch.accept_for(node.peer.place[0])
                if self._rng.random() < 0.5:
                    self._job.kill(node.name)
                self._stage.later(self._healed_later())

    async def _healed_later(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, 5 * self._plan.ttl_s))
        if self._job.switch is not None:
            self._job.switch.heal()
