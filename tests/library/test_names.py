"""Nodes whose own name is late in DNS, as that of a pod that has just started, and goes again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.library.nodes import LIMIT_S, Job
from tests.support.processes import free_port

NAME = "node-0.late.example"

_PROGRAM = """
import sys
import rdzv_etcd
from rdzv_etcd import log

log._FIRST_S = (1.0, 600.0)
group = rdzv_etcd.connect(
    sys.argv[1],
    job=sys.argv[2],
    nodes=1,
    local_addr=sys.argv[3],
    join_timeout=float(sys.argv[4]),
    embed="embed" in sys.argv,
    embed_grace=1,
)
for _ in range(2):
    print("joined", group.join().master.address, flush=True)
    sys.stdin.readline()
group.leave()
"""


_SILENT = "127.53.53.53"
"""Where a name server listens that never answers."""


class Resolver:
    """What a program finds when it looks up names, in a namespace of mounts of its own."""

    def __init__(self, folder: Path) -> None:
        self._hosts, self._switch = folder / "hosts", folder / "nsswitch.conf"
        servers = folder / "resolv.conf"
        servers.write_text(f"nameserver {_SILENT}\noptions timeout:30 attempts:5\n")
        self._switch.write_text("hosts: files\n")
        self.forget()
        self._enter = " && ".join(
            f"mount --bind {file} /etc/{file.name}" for file in (self._hosts, self._switch, servers)
        )

    def ask_a_server(self) -> None:
        """From now on it asks a name server."""
        self._switch.write_text("hosts: files dns\n")

    def add(self, name: str) -> None:
        with self._hosts.open("a") as file:
            file.write(f"127.0.0.1 {name}\n")

    def forget(self) -> None:
        self._hosts.write_text("127.0.0.1 localhost\n")

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        shell = ["unshare", "--mount", "sh", "-c", f'{self._enter} && exec "$@"', "sh"]
        return subprocess.Popen(
            [*shell, sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def said(node: subprocess.Popen[str]) -> str:
    assert node.stderr
    return node.stderr.readline()


def joins(
    node: subprocess.Popen[str], address: str, then: Callable[[], None] = lambda: None
) -> None:
    """See that it joins, and let it go on after ``then``."""
    assert node.stdout
    assert node.stdout.readline() == f"joined {address}\n"
    then()
    print(file=node.stdin, flush=True)


@pytest.fixture
def resolver(tmp_path: Path) -> Resolver:
    return Resolver(tmp_path)


def test_a_node_waits_for_its_own_name_and_keeps_it(job: Job, resolver: Resolver) -> None:
    """A pod that is not ready is not in DNS: its later rounds do not depend on that."""
    with resolver.run(job.server.endpoint, job.id, NAME, "600") as node:
        assert f"until this host can resolve its own name, local_addr {NAME}: " in said(node)
        resolver.add(NAME)
        joins(node, NAME, resolver.forget)
        joins(node, NAME)
        assert node.wait(LIMIT_S) == 0


def test_a_name_that_never_comes_ends_the_wait(job: Job, resolver: Resolver) -> None:
    limit_s = 3
    with resolver.run(job.server.endpoint, job.id, NAME, str(limit_s)) as node:
        _, errors = node.communicate(timeout=LIMIT_S)
    assert "until this host can resolve its own name" in errors
    assert f"local_addr is '{NAME}', which this host cannot resolve within {limit_s:g} s" in errors


@pytest.mark.parametrize("name", ["no..name", "10.0.0.256"])
def test_what_can_be_no_name_is_not_waited_for(job: Job, resolver: Resolver, name: str) -> None:
    with resolver.run(job.server.endpoint, job.id, name, "600") as node:
        _, errors = node.communicate(timeout=LIMIT_S)
    assert f"local_addr is '{name}', which this host cannot resolve" in errors
    assert "waiting" not in errors


@pytest.mark.parametrize("embed", [False, True], ids=["", "it starts etcd itself"])
def test_a_node_waits_for_the_name_of_its_endpoint(
    job: Job, resolver: Resolver, embed: bool
) -> None:
    """Like the first pod of a StatefulSet, with ``embed=1``."""
    given: tuple[str, ...]
    if embed:
        given, address = (f"{NAME}:{free_port()}", job.id, NAME, "600", "embed"), NAME
        words = f"{NAME} cannot be resolved on this machine"
    else:
        endpoint, address = f"also-late.example:1,{NAME}:{job.server.port}", "127.0.0.1"
        given = (endpoint, job.id, address, "600")
        words = f"resolve a name in --rdzv-endpoint, also-late.example, {NAME}: "
    with resolver.run(*given) as node:
        assert words in said(node)
        resolver.add(NAME)
        for _ in range(2):
            joins(node, address)
        assert node.wait(LIMIT_S) == 0


def test_a_search_for_an_embedded_etcd_ends_although_no_name_server_answers(
    job: Job, resolver: Resolver
) -> None:
    """It says what it waits for, and a signal ends it, while the resolver takes its minutes."""
    resolver.ask_a_server()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # several tests at once
        server.bind((_SILENT, 53))
        endpoint = f"{NAME}:{free_port()}"
        with resolver.run(endpoint, job.id, "127.0.0.1", "600", "embed") as node:
            words = f"etcd at http://{endpoint}: nothing is known yet: the search waits for"
            assert words in said(node)
            node.send_signal(signal.SIGINT)
            _, errors = node.communicate(timeout=LIMIT_S)
    assert "KeyboardInterrupt" in errors
