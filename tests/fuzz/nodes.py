"""Hostile values under the keys of a live job: what whole nodes make of them.

Whatever the value is, only this library's own errors come out, each names the key that is to blame
if one is, nothing waits forever, and once the value is gone all nodes work again.
"""

from __future__ import annotations

import random

from rdzv_etcd.errors import RdzvEtcdError, StateCorruptError
from rdzv_etcd.etcd.port import Delete, KeyValue, Put, Txn
from rdzv_etcd.testing import MemoryEtcd, SimClock
from tests.fuzz.mutate import nasty_bytes, nasty_json
from tests.sim.commits import FOREIGN, OPERATOR
from tests.sim.world import REQUEST_TIMEOUT_S, TTL_S, SimJob
from tests.support.machines import MachineLoop, run_on_machines

NAMES = "abc"
STANDS_S = 3 * TTL_S
"""How long a hostile value stands: anything that is to be noticed is."""
CONVERGES_S = 300.0


def hostile(rng: random.Random, victim: KeyValue) -> bytes:
    """Something like what is there, or nothing like it."""
    way = rng.random()
    if way < 0.6:
        try:
            return nasty_json(rng, victim.value)
        except ValueError:
            pass
    return nasty_bytes(rng, victim.value) if way < 0.9 else b"[" * rng.choice([10, 5000])


def nodes(rng: random.Random) -> None:
    """One job of three nodes that meets one hostile value."""
    run_on_machines(lambda loop: _meet(loop, rng), rng.randrange(2**32), limit_s=5_000.0)


async def _meet(loop: MachineLoop, rng: random.Random) -> None:
    clock = SimClock(loop)
    async with MemoryEtcd(clock, seed=loop.seed, request_timeout_s=REQUEST_TIMEOUT_S) as server:
        job = SimJob(loop, server, min_nodes=2, max_nodes=3, works=True, slice_nodes=2)
        job.start_all(NAMES[: rng.choice([2, 3])])
        await job.pass_time(rng.choice([0.01, 10.0, 40.0]))
        victim = rng.choice(server.snapshot())
        keys = [victim.key, victim.key, job.keys.node("stranger~1~x")]
        key = rng.choice(keys)
        lease = rng.choice([0, victim.lease_id])
        server.apply(Txn((), (Put(key, hostile(rng, victim), lease),)), FOREIGN)
        if rng.random() < 0.5:
            await job.pass_time(rng.uniform(0, TTL_S))
            job.crash(rng.choice(sorted(job.nodes)))  # so that the value is read, not only watched
        await job.pass_time(STANDS_S)
        server.apply(Txn((), (Delete(key),)), OPERATOR)
        await _converge(job)


async def _converge(job: SimJob) -> None:
    """Start again the nodes that have ended; then all work in one world."""
    ends_s = job.loop.time() + CONVERGES_S
    while not (len(job.nodes) == len(NAMES) and job.works(NAMES)) and job.loop.time() < ends_s:
        for name in NAMES:
            node = job.nodes.get(name)
            if node is None or node.crashed:
                job.start(name)
            elif node.error is not None:
                _check(node.error)
                await job.leave(name)
                job.start(name)
        await job.pass_time(1.0)
    await job.until_works(NAMES, 1.0)


def _check(error: RdzvEtcdError) -> None:
    assert "/rdzv_etcd/job/" in str(error) or not isinstance(error, StateCorruptError), error
    assert len(str(error)) < 10_000
