"""torchrun's agents look after their own hosts' workers, and these form the world: in_process=1.

The workers are those of examples/in_process.py, two on each host; its step log judges.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.tools import run_alone
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.netns import Network
from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agent, Job
from tests.torchrun.fork_server import ForkServers
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "in_process.py"
PER_HOST = 2


@dataclass
class SupervisedJob(Job):
    """One whose workers train until the job is closed."""

    def command(self, name: str) -> list[str]:
        command = super().command(name)
        script = command.index(str(EXAMPLE))
        log = f"--step-log={self.directory / name}.log"
        arguments = [log, "--passes=1000000", "--min-step-seconds=0.05", *self.script_args]
        return [*command[: script + 1], *arguments]


class Hosts:
    """Up to three hosts at one switch, and etcd beside them."""

    def __init__(self, etcd: EtcdServer, network: Network, folder: Path, stack: ExitStack) -> None:
        self._etcd = etcd
        self._folder = folder
        bridge = stack.enter_context(FaultBridge((etcd.host, etcd.port), host=network.gateway))
        fork_servers = stack.enter_context(ForkServers())
        self.of = {name: network.add_host() for name in "abc"}
        job = SupervisedJob(
            bridge.target,
            folder,
            "1:3",
            PER_HOST,
            conf="in_process=1,orphans=kill,lease_ttl=3,last_call_timeout=5,closed_ttl=5,ended_ttl=5",
            script=EXAMPLE,
            fork_servers=fork_servers,
        )
        self.training = Training(job, lambda: etcd.gateway)
        stack.callback(self.training.close)

    def start(self, host: str, **changes: Any) -> Agent:
        (agent,) = self.training.start(
            f"{host}{len(self.training.agents)}",
            enter=self.of[host].enter,
            GLOO_SOCKET_IFNAME=netns.DEVICE,
            **changes,
        )
        return agent

    def steps(self, agent: Agent) -> list[dict[str, Any]]:
        log = self._folder / f"{agent.name}.log"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def wait_for_world(self, *agents: Agent) -> set[int]:
        """Wait until the newest step of each of these agents' workers was made in one world of them
        all; return their process ids."""
        size = PER_HOST * len(agents)

        def workers() -> set[int]:
            newest = [line for agent in agents for line in self._newest(agent)]
            last = max((line["epoch"] for line in newest), default=0)
            there = {line["pid"] for line in newest if line["epoch"] == last}
            sizes = {line["world_size"] for line in newest if line["epoch"] == last}
            return there if len(there) == size and sizes == {size} else set()

        return self.training.wait_until(f"a world of {agents}", workers)

    def _newest(self, agent: Agent) -> list[dict[str, Any]]:
        return list({line["pid"]: line for line in self.steps(agent)}.values())

    def pids(self, agent: Agent) -> set[int]:
        """Of all workers that this agent has ever had, as far as they have made a step."""
        return {line["pid"] for line in self.steps(agent)}

    def close(self, *agents: Agent) -> None:
        """Let the job finish; these agents exit with 0."""
        for agent in agents:
            agent.may_end = True
        job = self.training.job.run_id
        closed = run_alone("close", job, "--succeeded", "-y", "--endpoint", self._etcd.endpoint)
        assert closed.code == 0, closed
        assert [agent.wait() for agent in agents] == [0] * len(agents)


@pytest.fixture
def hosts(etcd: EtcdServer, network: Network, tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(etcd, network, tmp_path, stack)


def test_what_happens_to_other_hosts_restarts_no_worker(hosts: Hosts) -> None:
    """One is killed, a host is added, falls silent, loses its agent, is drained: on the host that
    stays the same two processes train, whose agent has no restart to use up."""
    stays = hosts.start("a", max_restarts=0)
    other = hosts.start("b")
    workers = hosts.wait_for_world(stays, other) & hosts.pids(stays)
    assert len(workers) == PER_HOST

    victim = hosts.pids(other).pop()
    os.kill(victim, signal.SIGKILL)
    hosts.training.wait_until(
        "the killed worker's host is back", lambda: len(hosts.pids(other)) == 2 * PER_HOST
    )
    assert victim not in hosts.wait_for_world(stays, other)

    added = hosts.start("c")
    hosts.wait_for_world(stays, other, added)
    hosts.of["c"].cut()
    added.freeze()
    added.may_end = True
    hosts.wait_for_world(stays, other)

    other.may_end = True
    other.process.kill()  # the guard ends its workers
    hosts.wait_for_world(stays)

    drained = hosts.start("b")
    hosts.wait_for_world(stays, drained)
    drained.may_end = True
    drained.process.send_signal(signal.SIGUSR1)
    assert drained.wait() == 0
    hosts.wait_for_world(stays)
    assert "worker of rank" not in stays.output

    assert hosts.pids(stays) == workers
    sizes = {line["world_size"] for line in hosts.steps(stays)}
    assert sizes == {PER_HOST, 2 * PER_HOST, 3 * PER_HOST}  # a host comes and goes as a whole
    added.process.kill()
    hosts.close(stays)
    hosts.training.assert_nothing_left()


def test_a_host_without_restarts_left_fails_the_job(hosts: Hosts) -> None:
    """The other hosts' agents end with the reason, though they had restarts left."""
    other, fails = hosts.start("a"), hosts.start("b", max_restarts=1)
    hosts.wait_for_world(other, fails)
    before = hosts.pids(fails)
    os.kill(before.pop(), signal.SIGKILL)
    hosts.wait_for_world(other, fails)
    hosts.training.wait_until("two new workers", lambda: len(hosts.pids(fails)) == 2 * PER_HOST)
    other.may_end = fails.may_end = True
    (victim, *_) = hosts.wait_for_world(other, fails) & (hosts.pids(fails) - before)
    psutil.Process(victim).kill()
    assert fails.wait() == 1
    assert other.wait() == 1
    assert "failed: closed by" in other.output
    assert "failed with exit code -9" in other.output
    hosts.training.assert_nothing_left()


def test_a_host_with_another_number_of_workers_is_refused_alone(hosts: Hosts) -> None:
    """Its agent has no restart left, and the job goes on. `status` shows it for ten minutes."""
    stays, other = hosts.start("a", max_restarts=0), hosts.start("b")
    workers = hosts.wait_for_world(stays, other)
    refused = hosts.start("c", nproc=1, max_restarts=0)
    refused.may_end = True
    assert refused.wait() == 1
    assert "this host leaves, and the job continues without it: " in refused.output
    assert hosts.wait_for_world(stays, other) == workers
    hosts.close(stays, other)


def test_a_spare_host_takes_over_and_ends_well(hosts: Hosts) -> None:
    """Its workers wait until one host has left, because one of its workers was drained."""
    member, leaves = [hosts.start(name, nnodes="2") for name in "ab"]
    hosts.wait_for_world(member, leaves)
    spare = hosts.start("c", nnodes="2")
    hosts.training.wait_arrivals(3 * PER_HOST)
    assert not hosts.steps(spare)
    leaves.may_end = True
    (worker, *_) = hosts.pids(leaves)
    os.kill(worker, signal.SIGUSR1)
    assert leaves.wait() == 0
    hosts.wait_for_world(member, spare)
    hosts.close(member, spare)
    hosts.training.assert_nothing_left()


def test_agents_end_with_0_when_the_work_is_done(hosts: Hosts) -> None:
    agents = [hosts.start(name, nnodes="2", script_args=["--passes=2"]) for name in "ab"]
    for agent in agents:
        agent.may_end = True
    assert [agent.wait() for agent in agents] == [0, 0]
    assert any("test accuracy" in agent.output for agent in agents)
    assert all("is not finished" not in agent.output for agent in agents)
    hosts.training.assert_nothing_left()
