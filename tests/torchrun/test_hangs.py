"""Agents log, and commands print, what docs/troubleshooting.md and docs/guide.md quote.

Each scenario is one way in which people fail, through real torchrun at its default log level, on
hosts of their own, with an etcd that has TLS and users. It waits until every line that the document
quotes for it is on one of the screens. What they do most of the time is wait, as people do, so all
are played at once, each with a job and a bridge of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.certificates import Certificates, make_certificates
from tests.support.gloo_threads import none_left_behind
from tests.support.netns import Host, Network
from tests.support.servers import USER, USER_PASSWORD, EtcdBinary, EtcdServer
from tests.torchrun.agents import PATIENCE_S, Agent, Job, wait_until
from tests.torchrun.fork_server import ForkServers
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_DOCUMENTS = [
    Path(__file__).parents[2] / "docs" / name for name in ("troubleshooting.md", "guide.md")
]
_LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
_NAMES = ("gpu-01", "gpu-02", "gpu-03")
_JOB = "my-job"
"""The job's name in the documents."""
_LOOPBACK = ("-m", "torch.distributed.run", "--local-addr=127.0.0.1")
_NOBODYS = "02:00:00:00:00:99"
"""A hardware address that no host has: packets to it are lost, as in a firewall."""


def quoted(name: str) -> list[str]:
    """The lines that a document quotes for a test, in the block below its mark."""
    text = "\n".join(document.read_text() for document in _DOCUMENTS)
    found = re.search(rf"<!-- hang: {name} -->.*?```text\n(.*?)```", text, re.DOTALL)
    assert found is not None, name
    lines = [line.strip() for line in found[1].splitlines()]
    return [line for line in lines if line and not line.startswith("$ ")]


@dataclass(frozen=True)
class Site:
    """Three hosts, and an etcd beside them."""

    etcd: EtcdServer
    certificates: Certificates
    network: Network
    hosts: Mapping[str, Host]
    fork_servers: ForkServers

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on one of the hosts, under its name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        return self.hosts[name].enter(named)


@pytest.fixture(scope="module")
def site(etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if why_not := netns.why_not():
        pytest.skip(why_not)
    folder = tmp_path_factory.mktemp("hangs")
    with ExitStack() as stack:
        network = Network(folder)
        stack.callback(network.close)
        hosts = {name: network.add_host() for name in _NAMES}
        seen_at = ("127.0.0.1", network.gateway)
        certificates = make_certificates(folder / "certificates", hosts=seen_at)
        etcd = EtcdServer(etcd_binary, folder, certificates=certificates)
        stack.callback(etcd.stop)
        etcd.start_on_free_ports()
        etcd.enable_auth()
        yield Site(etcd, certificates, network, hosts, stack.enter_context(ForkServers()))


class Stage(Training):
    """One job, its way to etcd, and the screens of those who run it."""

    def __init__(self, site: Site, folder: Path, name: str) -> None:
        self.site = site
        self.name = name
        self.printed: list[str] = []
        etcd = site.etcd
        self.bridge = FaultBridge((etcd.host, etcd.port), host=site.network.gateway)
        self.endpoint = f"https://{self.bridge.target}"
        job = Job(self.endpoint, folder, "2", run_id=name, fork_servers=site.fork_servers)
        super().__init__(job, lambda: etcd.gateway)

    def close(self) -> None:
        super().close()
        self.bridge.close()

    def on(self, host: str, *, conf: str = "", **fields: Any) -> Agent:
        """Start torchrun on a host; ``fields`` of the :class:`Job` are as given."""
        (agent,) = self.start(
            f"{host}-{len(self.agents)}",
            conf=self.conf(conf),
            enter=partial(self.site.on, host),
            LOGLEVEL="WARNING",
            GLOO_SOCKET_IFNAME="eth0",
            **_LOGIN,
            **fields,
        )
        agent.may_end = True
        return agent

    def world(self) -> list[Agent]:
        members = [self.on("gpu-01"), self.on("gpu-02")]
        self.wait_for_world(*members)
        return members

    def conf(self, more: str = "") -> str:
        return ",".join(filter(None, (f"ca_cert={self.site.certificates.ca}", more)))

    def command(self, host: str, *words: str, conf: str = "") -> None:
        """Run ``rdzv-etcd`` about the job on a host."""
        command = [sys.executable, "-m", "rdzv_etcd", words[0], self.name, *words[1:]]
        command += [f"--rdzv-endpoint={self.endpoint}", f"--rdzv-conf={self.conf(conf)}"]
        done = subprocess.run(
            self.site.on(host, command),
            env={**os.environ, **_LOGIN, "COLUMNS": "150"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        self.printed += [done.stdout, done.stderr]

    def report(self) -> None:
        super().report()
        print(*self.printed, sep="\n")

    def shows_what_the_document_quotes(self) -> None:
        for line in quoted(self.name):
            wait_until(f"on a screen: {line}", partial(self._shows, line))

    def _shows(self, line: str) -> bool:
        screens = "\n".join((*(agent.output for agent in self.agents), *self.printed))
        # As in the document: this job, these hosts.
        screens = screens.replace(self.name, _JOB).replace(
            f"{self.site.network.prefix}.", "10.0.0."
        )
        pattern = r"\s+".join(".*".join(map(re.escape, word.split("…"))) for word in line.split())
        return re.search(pattern, screens) is not None


Scenario = Callable[[Stage], None]
SCENARIOS: dict[str, Scenario] = {}
"""By the names under which the documents quote their lines."""
AFTER_THE_OTHERS = ("a_firewall_between_nodes",)
"""Those that harm the hosts, which all share."""


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__] = play
    return play


@scenario
def a_node_never_starts(stage: Stage) -> None:
    stage.wait_for_output(stage.on("gpu-01"), "waiting 10 s")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


@scenario
def another_nnodes(stage: Stage) -> None:
    stage.wait_for_output(stage.on("gpu-01"), "waiting 10 s")
    assert stage.on("gpu-02", nnodes="3").wait() == 1
    stage.command("gpu-01", "status")
    stage.command("gpu-02", "doctor", "--nnodes=3")
    stage.shows_what_the_document_quotes()


@scenario
def nothing_at_the_endpoint(stage: Stage) -> None:
    endpoint = f"https://{stage.site.network.gateway}:1"
    assert stage.on("gpu-02", endpoint=endpoint).wait() == 1
    stage.shows_what_the_document_quotes()


@scenario
def a_loopback_address(stage: Stage) -> None:
    for host in ("gpu-01", "gpu-02"):
        agent = stage.on(host, launcher=_LOOPBACK)
    stage.wait_for_output(agent, "cannot reach")
    stage.command("gpu-02", "doctor")
    stage.shows_what_the_document_quotes()


@scenario
def a_spare(stage: Stage) -> None:
    stage.world()
    stage.wait_for_output(stage.on("gpu-03"), "waiting 10 s")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


@scenario
def a_finished_node(stage: Stage) -> None:
    done = stage.on("gpu-01", script_args=("--steps=3",))
    stage.on("gpu-02")
    stage.wait_for_output(done, "waiting 10 s for the others to finish")
    stage.command("gpu-02", "status")
    stage.shows_what_the_document_quotes()


@scenario
def a_late_node(stage: Stage) -> None:
    done = stage.on("gpu-01", nnodes="1", script_args=("--steps=3",))
    assert done.wait() == 0
    stage.wait_for_output(stage.on("gpu-02"), "waiting 10 s")
    stage.command("gpu-02", "status")
    stage.shows_what_the_document_quotes()


@scenario
def a_typo_in_the_id(stage: Stage) -> None:
    typo = stage.on("gpu-02", run_id=f"{stage.name}s")
    for agent in (stage.on("gpu-01"), typo):
        stage.wait_for_output(agent, "waiting 10 s")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()


@scenario
def another_prefix(stage: Stage) -> None:
    other = stage.on("gpu-02", conf="etcd_prefix=/rdzv_etcd/mine")
    for agent in (stage.on("gpu-01"), other):
        stage.wait_for_output(agent, "waiting 10 s")
    stage.shows_what_the_document_quotes()


@scenario
def no_permission(stage: Stage) -> None:
    conf = "etcd_prefix=/teams"
    assert stage.on("gpu-02", conf=conf).wait() == 1
    stage.command("gpu-02", "doctor", conf=conf)
    stage.shows_what_the_document_quotes()


@scenario
def another_authority(stage: Stage) -> None:
    conf = f"ca_cert={stage.site.certificates.foreign_ca}"
    assert stage.on("gpu-02", conf=conf).wait() == 1
    stage.command("gpu-02", "doctor", conf=conf)
    stage.shows_what_the_document_quotes()


@scenario
def a_firewall_between_nodes(stage: Stage) -> None:
    one, two = (stage.site.hosts[name] for name in _NAMES[:2])
    for here, there in ((one, two), (two, one)):
        way = (there.address, "lladdr", _NOBODYS, "dev", "eth0")
        here.run("ip", "neigh", "replace", *way)
    try:
        for host in ("gpu-01", "gpu-02"):
            agent = stage.on(host)
        stage.wait_for_output(agent, "cannot reach")
        stage.command("gpu-01", "doctor")
        stage.shows_what_the_document_quotes()
    finally:
        for here, there in ((one, two), (two, one)):
            here.run("ip", "neigh", "del", there.address, "dev", "eth0")


@scenario
def a_frozen_node(stage: Stage) -> None:
    left, frozen = stage.world()
    frozen.freeze()
    stage.wait_for_output(left, "waiting 10 s for round 2")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


@scenario
def workers_that_crash(stage: Stage) -> None:
    stage.on("gpu-01", max_restarts=1)
    crashes = stage.on("gpu-02", max_restarts=1, script_args=("--no-such-option",))
    assert [agent.wait() for agent in (crashes, stage.agents[0])] == [1, 1]
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


@scenario
def a_gate(stage: Stage) -> None:
    gate = stage.job.directory / "gpus.sh"
    gate.write_text('#!/bin/sh\n[ "$(hostname)" = gpu-01 ] || { echo 2 of 8 GPUs answer; exit 3; }')
    gate.chmod(0o755)
    sick = stage.on("gpu-02", conf=f"gate_command={gate}")
    stage.wait_for_output(stage.on("gpu-01", conf=f"gate_command={gate}"), "waiting 10 s")
    assert sick.wait() == 1
    stage.command("gpu-01", "status")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()


@scenario
def etcd_without_an_answer(stage: Stage) -> None:
    waits = stage.on("gpu-01")
    stage.wait_for_output(waits, "waiting 10 s")
    stage.bridge.black_hole()
    try:
        stage.wait_for_output(waits, "for etcd")
        stage.command("gpu-01", "doctor")
        stage.shows_what_the_document_quotes()
    finally:
        stage.bridge.heal()


@scenario
def what_an_agent_logs(stage: Stage) -> None:
    """A node is killed, etcd is silent for a while, and the node that is left alone works on."""
    conf = "last_call_timeout=60"
    left, drained, killed = (stage.on(host, nnodes="1:3", conf=conf) for host in _NAMES)
    stage.wait_for_world(left, drained, killed)
    killed.kill()
    stage.wait_for_world(left, drained)
    stage.bridge.black_hole()
    try:
        for agent in (left, drained):
            stage.wait_for_output(agent, "has not answered for")
    finally:
        stage.bridge.heal()
    for agent in (left, drained):  # or its goodbye message may not reach etcd
        stage.wait_for_output(agent, "answers again")
    drained.terminate()
    stage.wait_for_world(left)
    stage.shows_what_the_document_quotes()


@scenario
def two_launchers_on_one_host(stage: Stage) -> None:
    for _ in range(2):
        agent = stage.on("gpu-01", nnodes="3")
    stage.wait_for_output(agent, "waiting 10 s")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()


Played = Mapping[str, tuple[Stage, Future[None]]]


@pytest.fixture(scope="module")
def played(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """All scenarios, when they are over. Their processes are there until their tests end them."""
    with none_left_behind(tmp_path_factory.mktemp("exits")), ExitStack() as stack:
        stages = {name: Stage(site, tmp_path_factory.mktemp(name), name) for name in SCENARIOS}
        for stage in stages.values():
            stack.callback(stage.close)
        done: dict[str, tuple[Stage, Future[None]]] = {}
        for names in (SCENARIOS.keys() - AFTER_THE_OTHERS, AFTER_THE_OTHERS):
            with ThreadPoolExecutor(len(names)) as pool:
                for name in names:
                    done[name] = stages[name], pool.submit(SCENARIOS[name], stages[name])
        yield done


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_screens_show_what_the_document_quotes(played: Played, name: str) -> None:
    stage, end = played[name]
    stage.close()
    end.result()
