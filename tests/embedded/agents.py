"""Agents and hosts with an embedded etcd, and what they leave: for the tests of this folder."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rdzv_etcd.embedded.cluster_start import (
    ClusterState,
    cluster_endpoints,
    cluster_state,
    start_seat,
)
from rdzv_etcd.embedded.launch import Wait
from rdzv_etcd.embedded.port import PortAnswer, probe
from rdzv_etcd.settings import Endpoint, Settings, settings_from_config
from rdzv_etcd.trust import client_context
from tests.library.nodes import node_settings, wait_until
from tests.support.gateway import Gateway
from tests.support.processes import free_port

LIMIT_S = 60.0
ALL = {0, 1, 2}
"""The hosts of a cluster."""
GRACE_S = 5
"""How long a cluster waits for nodes in a test that waits for its end."""
UNUSED_S = 120
"""The same in another test, which may never have a node."""
SECRET, OTHER_SECRET = "staple-battery-horse", "one-that-is-not-theirs"

NOBODY = 65534
"""Another user, for tests that run as root."""

# What an agent does: ensure, tell the outcome, and stay until it is killed or its input ends.
_AGENT = """
import json, logging, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
logging.basicConfig(level=logging.INFO)
import encodings.idna
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings import settings_from_config
config = {"embed": 1, "embed_grace": float(sys.argv[3]), "join_timeout": 60}
settings = settings_from_config(endpoint=sys.argv[1], job_id="j", min_nodes=1, max_nodes=1,
                                local_addr=None, config=config, environ=os.environ)
uid = int(sys.argv[2])
if uid != os.getuid():
    os.setuid(uid)
sys.stdin.readline()
try:
    started = ensure_etcd(settings)
    print(json.dumps([started.supervisor_pid if started else None, ""]), flush=True)
except RdzvEtcdError as error:
    print(json.dumps([None, str(error)]), flush=True)
sys.stdin.readline()
"""


def settings(
    endpoint: str, *, secret: str | None = None, max_nodes: int = 1, **config: object
) -> Settings:
    return settings_from_config(
        endpoint=endpoint,
        job_id="job",
        min_nodes=1,
        max_nodes=max_nodes,
        local_addr=None,
        config={"embed": 1, "embed_grace": 1, "join_timeout": LIMIT_S, **config},
        environ=with_secret(secret),
    )


def with_secret(secret: str | None) -> dict[str, str]:
    return {} if secret is None else {"RDZV_ETCD_EMBED_SECRET": secret}


def environment(binary: Path | str, scratch: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "RDZV_ETCD_BINARY": str(binary), "TMPDIR": str(scratch), **more}


def has_ended(process: psutil.Process) -> bool:
    """Ended, or a zombie: who adopts orphans may take its time to reap them."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process: psutil.Process) -> None:
    wait_until(f"{process} has ended", lambda: has_ended(process))


class Agent:
    """A process that calls ``ensure_etcd``, in a session and process group of its own."""

    def __init__(
        self,
        endpoint: str,
        environ: dict[str, str],
        stderr: Path,
        *,
        within: Sequence[str] = (),
        uid: int = 0,
        grace_s: float = 1,
    ) -> None:
        """``within``: a command that runs it, such as ``unshare``; ``uid``: whom it becomes."""
        with stderr.open("ab") as log:
            arguments = (endpoint, str(uid or os.getuid()), str(grace_s))
            self.process = subprocess.Popen(
                [*within, sys.executable, "-c", _AGENT, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                text=True,
                start_new_session=True,
            )
        self._stderr = stderr

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def supervisor(self) -> int | None:
        """Return the pid of the supervisor it started, if it did."""
        pid, error = self._outcome()
        assert error == ""
        return pid

    def error(self) -> str:
        """Return what it was refused with; empty if it was not."""
        return self._outcome()[1]

    def log(self) -> str:
        return self._stderr.read_text()

    def wait_for_log(self, text: str) -> None:
        wait_until(f"{text!r} in the log", lambda: text in self.log())

    def close(self) -> None:
        with self.process:
            self.process.kill()

    def _outcome(self) -> tuple[int | None, str]:
        assert self.process.stdout is not None
        pid, error = json.loads(self.process.stdout.readline())
        return pid, error


class Cluster:
    """Three hosts, each with its supervisor while it runs."""

    def __init__(self, binary: Path, scratch: Path, secret: str | None) -> None:
        net = ".".join(str(random.SystemRandom().randrange(1, 255)) for _ in range(2))
        self.addresses = tuple(f"127.{net}.{number}" for number in (2, 3, 4))
        self.port = free_port(self.addresses[0])
        self.endpoints = ",".join(f"{address}:{self.port}" for address in self.addresses)
        self.secret = secret
        self.environ = environment(binary, scratch, **with_secret(secret))
        self.supervisors: dict[int, psutil.Process] = {}

    def settings(self, **config: Any) -> Settings:
        config = {"embed_grace": UNUSED_S, **config}
        return settings(self.endpoints, secret=self.secret, **config)

    def job(self) -> Settings:
        """What a node has that only uses it."""
        return node_settings(self.endpoints, "job", "2", environ=with_secret(self.secret))

    def start(self, *seats: int, **config: Any) -> None:
        made = self.settings(**config)
        endpoints, wait = cluster_endpoints(made.connection), Wait("member", "here", LIMIT_S)
        for seat in seats:
            started = start_seat(made, self.environ, endpoints, seat, wait)
            assert started is not None
            self.supervisors[seat] = psutil.Process(started.supervisor_pid)

    def state(self) -> ClusterState:
        return cluster_state(self.settings().connection)

    def wait_for(self, members: set[int]) -> None:
        """One that cannot start is tried again after half a minute at the latest."""
        seen: list[ClusterState] = []

        def are_there() -> bool:
            seen[:] = [self.state()]
            return seen[0].members == members

        try:
            wait_until(f"the members are {members}", are_there, 120.0)
        except AssertionError as error:
            raise AssertionError(f"{error}; {seen[0]}") from None

    def cluster(self) -> str:
        """What its founders have called it."""
        found = {it.own.member.cluster for it in self.state().answers.values() if it.own.member}
        assert len(found) == 1
        return found.pop()

    def lives(self) -> dict[int, str]:
        return {seat: answer.own.life for seat, answer in self.state().answers.items()}

    def lose(self, seat: int) -> None:
        """Kill everything on that host."""
        supervisor = self.supervisors.pop(seat)
        (etcd,) = supervisor.children()
        supervisor.kill()
        wait_for_end(etcd)

    def gateway(self, seat: int) -> Gateway:
        return gateway(self.port, self.secret, self.addresses[seat])

    def grant(self, seat: int, ttl_s: int = 600) -> int:
        return int(self.gateway(seat).call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])

    def find(self) -> None:
        """Take over the supervisors that others have started."""
        names = [f"{address}:{self.port}" for address in self.addresses]
        for process in psutil.process_iter(["cmdline"]):
            for seat, name in enumerate(names):
                if (process.info["cmdline"] or [""])[-1] == name and not has_ended(process):
                    self.supervisors[seat] = process

    def close(self) -> None:
        for supervisor in self.supervisors.values():
            kill(supervisor)


def kill(supervisor: psutil.Process) -> None:
    if not has_ended(supervisor):
        supervisor.kill()
        wait_for_end(supervisor)


def answer(port: int, host: str = "127.0.0.1", secret: str | None = None) -> PortAnswer:
    return probe(Endpoint(host, port), 5, secret).answer


def gateway(port: int, secret: str | None = None, host: str = "127.0.0.1") -> Gateway:
    """etcd as one with that secret sees it."""
    return Gateway(host, port, None if secret is None else client_context(secret))


def grant(port: int, ttl_s: int) -> int:
    reply = Gateway("127.0.0.1", port).call("/v3/lease/grant", {"TTL": str(ttl_s)})
    return int(reply["ID"])
