"""Agents with an embedded etcd, and what they leave: for the tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from rdzv_etcd.embedded.port import PortAnswer, probe
from rdzv_etcd.settings import Endpoint, Settings, settings_from_config
from tests.library.nodes import wait_until
from tests.support.gateway import Gateway

LIMIT_S = 60.0

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
                                local_addr=None, config=config, environ={})
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
    endpoint: str, *, login: tuple[str, str] | None = None, max_nodes: int = 1, **config: object
) -> Settings:
    names = ("RDZV_ETCD_USER", "RDZV_ETCD_PASSWORD")
    return settings_from_config(
        endpoint=endpoint,
        job_id="job",
        min_nodes=1,
        max_nodes=max_nodes,
        local_addr=None,
        config={"embed": 1, "embed_grace": 1, "join_timeout": LIMIT_S, **config},
        environ={} if login is None else dict(zip(names, login, strict=True)),
    )


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


def answer(port: int, host: str = "127.0.0.1") -> PortAnswer:
    return probe(Endpoint(host, port), 5).answer


def grant(port: int, ttl_s: int) -> int:
    reply = Gateway("127.0.0.1", port).call("/v3/lease/grant", {"TTL": str(ttl_s)})
    return int(reply["ID"])
