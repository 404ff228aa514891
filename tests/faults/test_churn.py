"""Sixteen nodes that come, leave and die at random, round after round; nothing piles up."""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import dataclass

import psutil
import pytest

from tests.faults.nodes import NodeProcess, Nodes
from tests.faults.servers import Job
from tests.support.servers import EtcdServer

_MOST = 16
_FEWEST = 6
_SEATS = 12
"""The nodes beyond wait as spares."""
_WARM_UP = 5
"""Rounds after which a process has allocated all that it keeps."""


@dataclass(frozen=True)
class Usage:
    """The resources of one process."""

    threads: int
    files: int
    rss_mib: float

    @classmethod
    def of(cls, node: NodeProcess) -> Usage:
        process = psutil.Process(node.process.pid)
        with process.oneshot():
            rss = process.memory_info().rss
            return cls(process.num_threads(), process.num_fds(), rss / 2**20)


class Census:
    """The nodes that live; the first stays to the end."""

    def __init__(self, nodes: Nodes, chance: random.Random) -> None:
        self._nodes = nodes
        self._chance = chance
        self._born = 0
        self.living: list[NodeProcess] = []

    def grow(self, count: int) -> None:
        names = [f"n{self._born + i:03}" for i in range(count)]
        self._born += count
        self.living += self._nodes.start(*names)

    def shake(self) -> str:
        """Do one round's harm; return it in words."""
        chance = self._chance
        joins = chance.randrange(1, 4) if len(self.living) < _MOST else 0
        joins = min(joins, _MOST - len(self.living))
        mortal = [node for node in self.living[1:] if node.started]
        most = max(0, min(3, len(self.living) - _FEWEST, len(mortal)))
        victims = chance.sample(
            mortal, chance.randrange(0 if joins else 1, most + 1) if most else 0
        )
        killed = 0
        for victim in victims:
            self.living.remove(victim)
            if chance.random() < 0.4:
                victim.kill()
                killed += 1
            else:
                victim.terminate()
        self.grow(joins)
        return f"{joins} join, {len(victims) - killed} leave, {killed} die"

    def is_settled(self) -> bool:
        """Whether all seats that can be taken are taken, by the living, in one world."""
        worlds = {node: node.working_in for node in self.living}
        working = {node: world for node, world in worlds.items() if world is not None}
        if len(working) != min(_SEATS, len(self.living)):
            return False
        first = next(iter(working.values()))
        return {world.epoch for world in working.values()} == {first.epoch} and set(
            first.members
        ) == {node.node_id for node in working}


def churn(nodes: Nodes, rounds: int, seed: int) -> tuple[Usage, Usage]:
    """Return what the oldest node held after a few rounds, and in the end."""
    census = Census(nodes, random.Random(seed))
    census.grow(_MOST)
    early = None
    for number in range(rounds):
        nodes.wait_until(f"the world of round {number}", census.is_settled)
        if number == _WARM_UP:
            early = Usage.of(census.living[0])
        print(f"{number}: {len(census.living)} nodes, {census.shake()}")
    nodes.wait_until("the last world", census.is_settled)
    assert early is not None
    return early, Usage.of(census.living[0])


def run(etcd: EtcdServer, job: Job, rounds: int) -> None:
    seed = int(os.environ.get("RDZV_ETCD_CHURN_SEED", secrets.randbelow(10**6)))
    rounds = int(os.environ.get("RDZV_ETCD_CHURN_ROUNDS", rounds))
    print(f"RDZV_ETCD_CHURN_SEED={seed} RDZV_ETCD_CHURN_ROUNDS={rounds}")
    nodes = job(etcd.endpoint, f"2:{_SEATS}", lease_ttl=2, last_call_timeout=10)
    early, late = churn(nodes, rounds, seed)
    print(f"measured: the oldest node held {early}, then {late}")
    assert late.threads <= early.threads + 1
    assert late.files <= early.files + 4
    assert late.rss_mib <= early.rss_mib + 16
    nodes.finish(etcd.gateway)


@pytest.mark.slow
def test_twelve_rounds_of_churn(etcd: EtcdServer, job: Job) -> None:
    run(etcd, job, 12)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_two_hundred_rounds_of_churn(etcd: EtcdServer, job: Job) -> None:
    run(etcd, job, 200)
