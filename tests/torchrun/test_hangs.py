"""What agents log and commands print, as the documents quote it, on real hosts.

Knows docs/troubleshooting.md and what docs/guide.md says that an agent logs.

Each test is one way in which people fail, through real torchrun at its default log level, on hosts
of their own, with an etcd that has TLS and users. It waits until every line that the document
quotes for it is on one of the screens.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.certificates import Certificates, make_certificates
from tests.support.netns import Host, Network
from tests.support.servers import USER, USER_PASSWORD, EtcdBinary, EtcdServer
from tests.torchrun.agents import PATIENCE_S, Agent, Agents, Job, wait_until
from tests.torchrun.fork_server import ForkServers

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_DOCUMENTS = [
    Path(__file__).parents[2] / "docs" / name for name in ("troubleshooting.md", "guide.md")
]
_LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
_NAMES = ("gpu-01", "gpu-02", "gpu-03")
_JOB = "my-job"
"""What the document calls the job."""
_LOOPBACK = ("-m", "torch.distributed.run", "--local-addr=127.0.0.1")
_NOBODYS = "02:00:00:00:00:99"
"""A hardware address that no host has: what is sent there is lost, as in a firewall."""


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
    bridge: FaultBridge
    hosts: Mapping[str, Host]
    fork_servers: ForkServers

    @property
    def endpoint(self) -> str:
        return f"https://{self.bridge.target}"

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
        network = Network(folder, joined=True)
        stack.callback(network.close)
        hosts = {name: network.add_host() for name in _NAMES}
        seen_at = ("127.0.0.1", network.gateway)
        certificates = make_certificates(folder / "certificates", hosts=seen_at)
        etcd = EtcdServer(etcd_binary, folder, certificates=certificates)
        stack.callback(etcd.stop)
        etcd.start_on_free_ports()
        etcd.enable_auth()
        bridge = stack.enter_context(FaultBridge((etcd.host, etcd.port), host=network.gateway))
        yield Site(etcd, certificates, network, bridge, hosts, stack.enter_context(ForkServers()))


@dataclass
class Stage:
    """One job, and what is on the screens of those who run it."""

    site: Site
    agents: Agents
    folder: Path
    name: str
    started: list[Agent] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    def start(self, host: str, *, nnodes: str = "2", conf: str = "", **fields: Any) -> Agent:
        """Start torchrun on a host; ``fields`` of the :class:`Job` are as given."""
        given = {"endpoint": self.site.endpoint, "run_id": self.name, **fields}
        job = Job(
            directory=self.folder,
            nnodes=nnodes,
            conf=self.conf(conf),
            enter=partial(self.site.on, host),
            fork_servers=self.site.fork_servers,
            **given,
        )
        (agent,) = self.agents.start(
            job,
            f"{host}-{len(self.started)}",
            LOGLEVEL="WARNING",
            GLOO_SOCKET_IFNAME="eth0",
            **_LOGIN,
        )
        agent.may_end = True
        self.started.append(agent)
        return agent

    def world(self) -> list[Agent]:
        members = [self.start("gpu-01"), self.start("gpu-02")]
        self.agents.wait_for_world(members, size=2)
        return members

    def conf(self, more: str = "") -> str:
        return ",".join(filter(None, (f"ca_cert={self.site.certificates.ca}", more)))

    def command(self, host: str, *words: str, conf: str = "") -> None:
        """Run ``rdzv-etcd`` about the job on a host."""
        command = [sys.executable, "-m", "rdzv_etcd", words[0], self.name, *words[1:]]
        command += [f"--rdzv-endpoint={self.site.endpoint}", f"--rdzv-conf={self.conf(conf)}"]
        done = subprocess.run(
            self.site.on(host, command),
            env={**os.environ, **_LOGIN, "COLUMNS": "150"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        print(done.stdout, done.stderr)
        self.printed += [done.stdout, done.stderr]

    def wait_for(self, agent: Agent, words: str) -> None:
        wait_until(f"{words!r} on {agent}", lambda: words in agent.output)

    def shows_what_the_document_quotes(self) -> None:
        for line in quoted(self.name):
            wait_until(f"on a screen: {line}", partial(self._shows, line))

    def _shows(self, line: str) -> bool:
        screens = "\n".join((*(agent.output for agent in self.started), *self.printed))
        # As in the document: this job, these hosts.
        screens = screens.replace(self.name, _JOB).replace(
            f"{self.site.network.prefix}.", "10.0.0."
        )
        pattern = r"\s+".join(".*".join(map(re.escape, word.split("…"))) for word in line.split())
        return re.search(pattern, screens) is not None


@pytest.fixture
def stage(
    site: Site, agents: Agents, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Stage]:
    stage = Stage(site, agents, tmp_path, request.node.originalname.removeprefix("test_"))
    yield stage
    for agent in stage.started:
        agent.thaw()


def test_a_node_never_starts(stage: Stage) -> None:
    stage.wait_for(stage.start("gpu-01"), "waiting 10 s")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


def test_another_nnodes(stage: Stage) -> None:
    stage.wait_for(stage.start("gpu-01"), "waiting 10 s")
    assert stage.start("gpu-02", nnodes="3").wait() == 1
    stage.command("gpu-01", "status")
    stage.command("gpu-02", "doctor", "--nnodes=3")
    stage.shows_what_the_document_quotes()


def test_nothing_at_the_endpoint(stage: Stage) -> None:
    endpoint = f"https://{stage.site.network.gateway}:1"
    assert stage.start("gpu-02", endpoint=endpoint).wait() == 1
    stage.shows_what_the_document_quotes()


def test_a_loopback_address(stage: Stage) -> None:
    for host in ("gpu-01", "gpu-02"):
        agent = stage.start(host, launcher=_LOOPBACK)
    stage.wait_for(agent, "cannot reach")
    stage.command("gpu-02", "doctor")
    stage.shows_what_the_document_quotes()


def test_a_spare(stage: Stage) -> None:
    stage.world()
    stage.wait_for(stage.start("gpu-03"), "waiting 10 s")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


def test_a_finished_node(stage: Stage) -> None:
    done = stage.start("gpu-01", script_args=("--steps=3",))
    stage.start("gpu-02")
    stage.wait_for(done, "waiting 10 s for the others to finish")
    stage.command("gpu-02", "status")
    stage.shows_what_the_document_quotes()


def test_a_late_node(stage: Stage) -> None:
    done = stage.start("gpu-01", nnodes="1", script_args=("--steps=3",))
    assert done.wait() == 0
    stage.wait_for(stage.start("gpu-02"), "waiting 10 s")
    stage.command("gpu-02", "status")
    stage.shows_what_the_document_quotes()


def test_a_typo_in_the_id(stage: Stage) -> None:
    typo = stage.start("gpu-02", run_id=f"{stage.name}s")
    for agent in (stage.start("gpu-01"), typo):
        stage.wait_for(agent, "waiting 10 s")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()


def test_another_prefix(stage: Stage) -> None:
    other = stage.start("gpu-02", conf="etcd_prefix=/rdzv_etcd/mine")
    for agent in (stage.start("gpu-01"), other):
        stage.wait_for(agent, "waiting 10 s")
    stage.shows_what_the_document_quotes()


def test_no_permission(stage: Stage) -> None:
    conf = "etcd_prefix=/teams"
    assert stage.start("gpu-02", conf=conf).wait() == 1
    stage.command("gpu-02", "doctor", conf=conf)
    stage.shows_what_the_document_quotes()


def test_another_authority(stage: Stage) -> None:
    conf = f"ca_cert={stage.site.certificates.foreign_ca}"
    assert stage.start("gpu-02", conf=conf).wait() == 1
    stage.command("gpu-02", "doctor", conf=conf)
    stage.shows_what_the_document_quotes()


def test_a_firewall_between_nodes(stage: Stage) -> None:
    one, two = (stage.site.hosts[name] for name in _NAMES[:2])
    for here, there in ((one, two), (two, one)):
        way = (there.address, "lladdr", _NOBODYS, "dev", "eth0")
        here.run("ip", "neigh", "replace", *way)
    try:
        for host in ("gpu-01", "gpu-02"):
            agent = stage.start(host)
        stage.wait_for(agent, "cannot reach")
        stage.command("gpu-01", "doctor")
        stage.shows_what_the_document_quotes()
    finally:
        for here, there in ((one, two), (two, one)):
            here.run("ip", "neigh", "del", there.address, "dev", "eth0")


def test_a_frozen_node(stage: Stage) -> None:
    left, frozen = stage.world()
    frozen.freeze()
    stage.wait_for(left, "waiting 10 s for round 2")
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


def test_workers_that_crash(stage: Stage) -> None:
    stage.start("gpu-01", max_restarts=1)
    crashes = stage.start("gpu-02", max_restarts=1, script_args=("--no-such-option",))
    assert [agent.wait() for agent in (crashes, stage.started[0])] == [1, 1]
    stage.command("gpu-01", "status")
    stage.shows_what_the_document_quotes()


def test_a_gate(stage: Stage) -> None:
    gate = stage.folder / "gpus.sh"
    gate.write_text('#!/bin/sh\n[ "$(hostname)" = gpu-01 ] || { echo 2 of 8 GPUs answer; exit 3; }')
    gate.chmod(0o755)
    sick = stage.start("gpu-02", conf=f"gate_command={gate}")
    stage.wait_for(stage.start("gpu-01", conf=f"gate_command={gate}"), "waiting 10 s")
    assert sick.wait() == 1
    stage.command("gpu-01", "status")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()


def test_etcd_without_an_answer(stage: Stage) -> None:
    waits = stage.start("gpu-01")
    stage.wait_for(waits, "waiting 10 s")
    stage.site.bridge.black_hole()
    try:
        stage.wait_for(waits, "for etcd")
        stage.command("gpu-01", "doctor")
        stage.shows_what_the_document_quotes()
    finally:
        stage.site.bridge.heal()


def test_what_an_agent_logs(stage: Stage) -> None:
    """A node is killed, etcd is silent for a while, and the node that is left alone works on."""
    conf = "last_call_timeout=60"
    left, drained, killed = (stage.start(host, nnodes="1:3", conf=conf) for host in _NAMES)
    stage.agents.wait_for_world([left, drained, killed], size=3)
    killed.kill()
    stage.agents.wait_for_world([left, drained], size=2)
    stage.site.bridge.black_hole()
    try:
        for agent in (left, drained):
            stage.wait_for(agent, "has not answered for")
    finally:
        stage.site.bridge.heal()
    for agent in (left, drained):  # or its word that it leaves may not reach etcd
        stage.wait_for(agent, "answers again")
    drained.terminate()
    stage.agents.wait_for_world([left], size=1)
    stage.shows_what_the_document_quotes()


def test_two_launchers_on_one_host(stage: Stage) -> None:
    for _ in range(2):
        agent = stage.start("gpu-01", nnodes="3")
    stage.wait_for(agent, "waiting 10 s")
    stage.command("gpu-01", "doctor")
    stage.shows_what_the_document_quotes()
