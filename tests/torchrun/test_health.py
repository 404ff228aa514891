"""Agents that are drained, wedged, or kept out by their gate."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rdzv_etcd.world_change import how_wedged, left
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agent, Agents, Job
from tests.torchrun.in_etcd import leader
from tests.torchrun.test_refusals import refused

pytestmark = pytest.mark.torchrun

_LONG = "lease_ttl=3000,last_call_timeout=5,closed_ttl=3,ended_ttl=3"
"""A lease that tells nobody anything."""
_WATCHDOG_S = 15
"""Longer than an agent on a busy machine needs to start its workers."""


def drain(agent: Agent) -> None:
    agent.may_end = True
    agent.process.send_signal(signal.SIGUSR1)


@pytest.mark.slow
def test_a_drained_agent_ends_well_and_costs_the_others_no_restart(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """First one that does not lead, then the leader; nobody may restart after a failure."""
    job = Job(etcd.target, tmp_path, nnodes="1:3", conf=_LONG, max_restarts=0)
    alive = agents.start(job, "a", "b", "c")
    agents.wait_for_world(alive, size=3)
    first = leader(etcd, job, alive)
    for drained in (next(agent for agent in alive if agent is not first), first):
        drained_at = time.time()
        drain(drained)
        assert drained.wait() == 0
        alive.remove(drained)
        agents.wait_for_world(alive, size=len(alive), after=drained_at)
    assert left("", "drained: SIGUSR1") in first.output
    job.stop_file.touch()
    assert [agent.wait() for agent in alive] == [0]


@pytest.mark.slow
def test_a_drained_spare_ends_well_at_once(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    job = Job(etcd.target, tmp_path, nnodes="1", conf=_LONG)
    (member,) = agents.start(job, "member")
    agents.wait_for_world([member], size=1)
    (spare,) = agents.start(job, "spare")
    agents.wait_until("its arrival", lambda: "arrived for round" in spare.output)
    drain(spare)
    assert spare.wait() == 0
    agents.wait_for_undisturbed_steps([member], 3)
    job.stop_file.touch()
    assert member.wait() == 0


@pytest.mark.slow
def test_a_wedged_agent_is_lost_and_comes_back(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Its main thread hangs; its worker and all its other threads go on, and its lease would."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launcher = [str(Path(__file__).with_name("wedged.py")), str(fifo)]
    conf = f"{_LONG},watchdog={_WATCHDOG_S}"
    job = Job(etcd.target, tmp_path, nnodes="1:2", conf=conf, launcher=launcher)
    wedged, other = agents.start(job, "wedged", "other")
    agents.wait_for_world([wedged, other], size=2)
    wedged_at = time.time()
    wedged.process.send_signal(signal.SIGUSR2)
    agents.wait_for_world([other], size=1, after=wedged_at)
    assert how_wedged(15.0) in other.output
    assert "fifo.read_text()" in wedged.output  # where its thread is
    back_at = time.time()
    fifo.write_text("go on")
    agents.wait_for_world([wedged, other], size=2, after=back_at)
    job.stop_file.touch()
    assert [wedged.wait(), other.wait()] == [0, 0]
    assert ": this node is hung: " not in other.output


@pytest.mark.slow
def test_a_node_that_does_not_pass_its_gate_ends_with_a_line_that_says_why(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    check = tmp_path / "check.py"
    check.write_text(
        "import os, sys\n"
        "told = ('RDZV_ETCD_JOB_ID', 'RDZV_ETCD_NODE_ID', 'RDZV_ETCD_ROUND')\n"
        "print(*[os.environ[name] for name in told], flush=True)\n"
        "print('2 of 8 GPUs answer')\n"
        "sys.exit(int(os.environ.get('SICK', '0')))\n"
    )
    conf = f"{QUICK},gate_command={sys.executable} {check}"
    job = Job(etcd.target, tmp_path, nnodes="1", conf=conf)
    refused(
        agents,
        job,
        r"RendezvousError: .* does not join job 'job-\w+': its gate '.*check\.py' ended with exit "
        "code 3: 2 of 8 GPUs answer",
        SICK="3",
    )
    (healthy,) = agents.start(job, "healthy")
    agents.wait_for_world([healthy], size=1)
    job.stop_file.touch()
    assert healthy.wait() == 0
