"""Nodes that die, fall silent, or cannot start their workers; the others continue without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.world_change import HOST_SILENT, left
from tests.support.bridge import FaultBridge
from tests.support.netns import Network
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.mark.parametrize("dead_rank", [0, pytest.param(1, marks=pytest.mark.release)])
def test_no_node_waits_for_one_that_died_after_it_arrived(
    dead_rank: int, etcd: EtcdServer, train: Callable[..., Training]
) -> None:
    """A round is formed with a dead node, because its lease still lives; the others form another.

    Without help torch's agents would wait 300 s for the dead one's part in assigning the workers'
    ranks, and fail then.
    """
    job = train("3", conf="lease_ttl=20,closed_ttl=3,ended_ttl=3,rank_key=RACK")
    (first,) = job.start("first", RACK=str(1 - dead_rank))
    # The first one leads: without a leader no round would be formed before the lease has run out.
    job.wait_arrivals(1)
    (dead,) = job.start("dead", RACK=str(dead_rank))
    job.wait_arrivals(2)
    with FaultBridge((etcd.host, etcd.port)) as bridge:
        bridge.black_hole()  # the last one is to arrive as soon as the second is dead
        (last,) = job.start("last", endpoint=bridge.target, RACK="2")
        job.wait_until("the last one's first request", lambda: bridge.connections > 0)
        dead.kill()
        bridge.heal()
        for alive in (first, last):  # with the dead one
            job.wait_for_output(alive, "round 1 formed in")
        job.start("replacement", RACK="3")
        job.wait_for_world()
        job.finish()


def test_the_workers_of_a_killed_agent_are_ended(train: Callable[..., Training]) -> None:
    """Only the agent is killed, as when its host is out of memory. The other node's live on."""
    job = train("1:2", nproc=2, conf=f"{QUICK},orphans=kill")
    dead, other = job.start("dead", "other")
    job.wait_for_world()
    workers = [psutil.Process(pid) for pid in {step.pid for step in dead.steps()}]
    dead.may_end = True
    dead.process.kill()
    dead.process.wait()
    job.wait_until("its workers are ended", lambda: not any(map(_lives, workers)))
    job.wait_for_output(dead, "died without leaving the job")
    job.wait_for_world(other)
    job.finish()
    assert "died without leaving the job" not in other.output


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_host_that_falls_silent_is_noticed_though_its_lease_lives(
    etcd: EtcdServer, train: Callable[..., Training], network: Network
) -> None:
    """Its cable is pulled and all its processes are stopped: none of them can announce it."""
    ttl_s = 20  # only a node that has been there for a TTL itself is believed
    with FaultBridge((etcd.host, etcd.port), host=network.gateway) as bridge:
        conf = f"last_call_timeout=5,closed_ttl=3,ended_ttl=3,lease_ttl={ttl_s}"
        job = train("2:3", endpoint=bridge.target, conf=conf)
        try:
            hosts = [network.add_host() for _ in range(3)]
            silent, *others = (
                job.start(f"node{number}", enter=host.enter, GLOO_SOCKET_IFNAME="eth0")[0]
                for number, host in enumerate(hosts)
            )
            job.wait_for_world()
            job.train_for(ttl_s)
            hosts[0].cut()
            silent.freeze()
            job.wait_for_world(*others)
            for survivor in others:  # a lease that ends is reported as "lease expired"
                assert f": {HOST_SILENT}" in survivor.output
        finally:
            job.close()


def test_a_newcomer_that_cannot_start_its_workers_does_not_end_the_job(
    train: Callable[..., Training],
) -> None:
    """The others were asked to take it in, and form a world without it when it has gone."""
    soon = QUICK.replace("last_call_timeout=5", "last_call_timeout=1")
    job = train("1:3", max_restarts=0, conf=soon)
    (healthy,) = job.start("healthy")
    job.wait_for_world()
    began_at = time.time()
    no_python = (*job.job.launcher, "--no-python")
    (newcomer,) = job.start("newcomer", launcher=no_python, script=Path("/no/such/program"))
    assert newcomer.wait() != 0
    job.wait_for_world(healthy, after=began_at)
    with job.undisturbed(for_s=2):
        pass
    assert left("", "its agent failed: ")[:-1] in healthy.output
    job.finish()
