"""torchrun on an embedded cluster of three, whose hosts are lost in turn with everything on them.

The hosts are network namespaces: what a host loses is every process in its own.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rdzv_etcd.embedded.cluster_start import cluster_state
from rdzv_etcd.settings import Connection, Endpoint
from tests.embedded.agents import SECRET, gateway
from tests.support import netns
from tests.support.gateway import Gateway, GatewayError
from tests.support.netns import Network
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary
from tests.torchrun.agents import DIGITS, QUICK, Agent, Job, wait_until
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

ALL = {0, 1, 2}


class Site:
    """Three hosts, an agent on each, and the cluster that the agents keep."""

    def __init__(
        self, binary: EtcdBinary, network: Network, folder: Path, stack: ExitStack
    ) -> None:
        self.hosts = [network.add_host() for _ in range(3)]
        stack.callback(self._end_all)
        port = free_port()
        self._endpoints = [Endpoint(host.address, port) for host in self.hosts]
        self._disks = [folder / f"disk{number}" for number in ALL]
        for disk in self._disks:
            disk.mkdir()
        self._environment = {
            "RDZV_ETCD_BINARY": str(binary.path),
            "RDZV_ETCD_EMBED_SECRET": SECRET,
        }
        self._connection = Connection(tuple(self._endpoints), secret=SECRET)
        endpoint = ",".join(it.target for it in self._endpoints)
        conf = f"{QUICK},embed=1,embed_grace=10"
        self.training = Training(Job(endpoint, folder, nnodes="2:3", conf=conf), self._store)
        stack.callback(self.training.close)
        self._agents: dict[int, Agent] = {}

    def start(self, number: int, name: str, **changes: Any) -> Agent:
        here = {"enter": self.hosts[number].enter, "TMPDIR": str(self._disks[number])}
        (agent,) = self.training.start(name, **here, **self._environment, **changes)
        self._agents[number] = agent
        return agent

    def lose(self, *numbers: int, silently: bool = False) -> None:
        """Kill all that runs on these hosts, at once. Silently: the others get no word of it."""
        for number in numbers:
            self._agents[number].may_end = True
            if silently:
                self.hosts[number].cut()
        netns.lose(*(self.hosts[number] for number in numbers))
        for number in numbers:
            self._agents.pop(number).process.wait()
        wait_until(
            "nothing runs on them", lambda: not any(self.hosts[it].processes() for it in numbers)
        )

    def servers_of(self, number: int) -> set[str]:
        """The members that this host's agent is connected to, by address."""
        port = self._endpoints[number].port
        command = self.hosts[number].enter(["ss", "-Htn", f"dport = :{port}"])
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {
            line.split()[4].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            for line in found.splitlines()
        }

    def etcd(self, number: int) -> list[psutil.Process]:
        """The member of a host, and what keeps it."""
        there = self.hosts[number].processes()
        with suppress(psutil.NoSuchProcess):  # it is just ending
            etcds = [process for process in there if process.name() == "etcd"]
            return [*etcds, *(parent for etcd in etcds if (parent := etcd.parent()) is not None)]
        return []

    def wait_for_members(self, members: set[int]) -> None:
        """Until the hosts that are there agree."""
        wait_until(
            f"the members are {members}",
            lambda: cluster_state(self._connection).members == members,
        )

    def wait_for_the_end(self) -> None:
        wait_until("all have ended", lambda: not any(host.processes() for host in self.hosts))

    def assert_nothing_left(self, *lost: int) -> None:
        """Nor on any disk but those of lost hosts, which are tidied at the next start."""
        self.wait_for_the_end()
        disks = [disk for number, disk in enumerate(self._disks) if number not in lost]
        assert [it for disk in disks for it in disk.iterdir() if "embedded" in it.name] == []

    def _store(self) -> Gateway:
        for it in self._endpoints:
            found = gateway(it.port, SECRET, it.host)
            try:
                found.keys(b"/")
            except (OSError, GatewayError):
                continue
            return found
        raise OSError("no member answers")

    def _end_all(self) -> None:
        for process in [it for host in self.hosts for it in host.processes()]:
            process.kill()


@pytest.fixture
def site(etcd_binary: EtcdBinary, network: Network, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(etcd_binary, network, tmp_path, stack)


def test_every_host_is_lost_in_turn_with_its_member_and_comes_back(site: Site) -> None:
    """Agent, workers, supervisor and etcd; the second host falls silent as well."""
    training = site.training
    for number in ALL:
        site.start(number, f"h{number}")
    first = training.wait_for_world()
    for number in ALL:  # on a busy machine, an agent may have left its own for a while
        assert site.hosts[number].address in site.servers_of(number)
    for number in ALL:
        site.wait_for_members(ALL)
        with training.reformed_once():
            site.lose(number, silently=number == 1)
        site.wait_for_members(ALL - {number})
        began = time.time()
        with training.reformed_once():
            site.hosts[number].heal()
            site.start(number, f"h{number}-back")
        site.wait_for_members(ALL)
        print(f"measured: host {number} was a member again {time.time() - began:.1f} s after")
    assert training.wait_for_world()[0].epoch > first[0].epoch
    logged = "".join(it.output for it in training.agents)
    assert "anyone who can reach" not in logged
    assert SECRET not in logged
    training.end_workers()
    site.assert_nothing_left()


def test_all_hosts_are_lost_at_once_and_the_job_goes_on_from_its_checkpoint(
    site: Site, tmp_path: Path
) -> None:
    """Of all that the cluster knew nothing is left; the checkpoints were on another machine."""
    training = site.training

    def start(number: int, name: str) -> None:
        options = [f"--checkpoint-dir={tmp_path}/host{number}", "--checkpoint-every=5"]
        options += ["--passes=100000", "--min-step-seconds=0.1"]
        device = {"GLOO_SOCKET_IFNAME": netns.DEVICE}
        site.start(number, name, script=DIGITS, script_args=options, max_restarts=100, **device)

    for number in ALL:
        start(number, f"h{number}")
    before = training.wait_for_world(steps=12)[0]
    site.wait_for_members(ALL)
    site.lose(*ALL)
    newest = max(step.step for agent in training.agents for step in agent.steps())
    began = time.time()
    for number in ALL:
        start(number, f"h{number}-back")
    after = training.wait_for_world()[0]
    print(f"measured: first step {after.time - began:.1f} s after the start")
    assert after.epoch > before.epoch
    assert newest - 10 < after.resumed_from <= newest
    site.wait_for_members(ALL)


@pytest.mark.release
def test_a_host_is_lost_before_the_first_round_while_arriving_and_in_the_grace(site: Site) -> None:
    training = site.training
    for number in ALL:
        site.start(number, f"h{number}")
    training.wait_until("host 2 has begun", lambda: len(site.hosts[2].processes()) > 1)
    site.lose(2)
    training.wait_for_world()
    arriving = site.start(2, "h2-arrives")
    pid = arriving.process.pid
    training.wait_until("host 2 has arrived", lambda: pid in training.present())
    site.lose(2)
    began = time.time()
    site.start(2, "h2-back")
    training.wait_for_world(after=began)
    site.wait_for_members(ALL)
    training.end_workers()
    site.lose(0)
    site.assert_nothing_left(0)


@pytest.mark.release
@pytest.mark.parametrize("silently", [False, True], ids=["killed", "silent"])
def test_a_host_is_lost_while_the_job_ends(site: Site, silently: bool) -> None:
    """First one whose workers have finished, then the last that trains, then one as the job ends:
    what is left ends well, sooner than torch's exit barrier would give up."""
    training = site.training

    def start(number: int, name: str) -> Agent:
        stop = f"--stop-file={training.own_stop_file(name)}"
        return site.start(number, name, nnodes="1:3", script_args=[stop])

    a, b, _ = (start(number, f"h{number}") for number in sorted(ALL))
    training.wait_for_world()
    site.wait_for_members(ALL)
    training.finish_early(a)
    with training.reformed_once():
        site.lose(0, silently=silently)
    site.wait_for_members({1, 2})
    site.hosts[0].heal()
    began = time.time()
    back = start(0, "h0-back")
    training.wait_for_world(after=began)
    site.wait_for_members(ALL)

    training.finish_early(back, b)
    site.lose(2, silently=silently)
    site.wait_for_members({0, 1})
    _, supervisor = site.etcd(1)
    supervisor.terminate()  # it stays: without it there is no majority
    site.hosts[2].heal()
    last = start(2, "h2-back")
    training.wait_for_world(last)
    wait_until(
        "its agent has started another one",
        lambda: (there := site.etcd(1)) and supervisor not in there,
    )
    site.wait_for_members(ALL)

    last.may_end = True
    training.own_stop_file("h2-back").touch()
    wait_until("one has ended", lambda: any(it.process.poll() is not None for it in (back, b)))
    site.lose(2, silently=silently)
    assert [back.wait(), b.wait()] == [0, 0]
    site.assert_nothing_left(2)


@pytest.mark.release
def test_hosts_and_members_are_killed_paused_and_cut_at_random(site: Site) -> None:
    """For ``RDZV_ETCD_CHAOS_S`` seconds, as ``RDZV_ETCD_CHAOS_SEED`` chooses."""
    seed = int(os.environ.get("RDZV_ETCD_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    draw, training = random.Random(seed), site.training
    print(f"measured: seed {seed}")
    for number in ALL:
        site.start(number, f"h{number}")
    training.wait_for_world()
    site.wait_for_members(ALL)
    until_s = time.monotonic() + float(os.environ.get("RDZV_ETCD_CHAOS_S", "120"))
    done = Counter[str]()
    while time.monotonic() < until_s:
        number, fault = draw.randrange(3), draw.choice(_FAULTS)
        done[fault] += 1
        print(f"measured: {fault}, host {number}, at {time.time():.1f}")
        _hurt(site, number, fault, back=f"h{number}-{done.total()}", pause_s=draw.uniform(0.5, 8))
        training.train_for(1)
        site.wait_for_members(ALL)
        _assert_one_world(training)
    print(f"measured: {dict(done)}")
    training.end_workers()
    site.assert_nothing_left()


_FAULTS = ("host killed", "host silent", "member killed", "member paused", "cable cut")


def _hurt(site: Site, number: int, fault: str, *, back: str, pause_s: float) -> None:
    """Do it and undo it, until all train in one world again."""
    training, host = site.training, site.hosts[number]
    began = time.time()
    if fault.startswith("host"):
        site.lose(number, silently=fault == "host silent")
        training.wait_for_world(after=began)
        host.heal()
        began = time.time()
        site.start(number, back)
        training.wait_for_world(after=began)
    elif fault == "member killed":
        for process in site.etcd(number):
            process.kill()
        training.train_for(pause_s)
    elif fault == "member paused":
        paused = site.etcd(number)
        for process in paused:
            process.suspend()
        training.train_for(pause_s)
        for process in paused:
            process.resume()
    else:
        host.cut()
        training.train_for(pause_s)
        host.heal()
    training.wait_for_world()


def _assert_one_world(training: Training) -> None:
    """Each epoch is one world, with one agent for each rank; no agent goes back."""
    owners: dict[tuple[int, int], str] = {}
    sizes: dict[int, int] = {}
    for agent in training.agents:
        steps = agent.steps()
        epochs = [step.epoch for step in steps]
        assert epochs == sorted(epochs), f"{agent} went back to an old world"
        for step in steps:
            assert owners.setdefault((step.epoch, step.rank), agent.name) == agent.name
            assert sizes.setdefault(step.epoch, step.world_size) == step.world_size
