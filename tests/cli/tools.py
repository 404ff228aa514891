"""Runs the command line, in this process or in one of its own, and plants what others wrote."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd.cli.app import run
from rdzv_etcd.protocol.codec import encode_node, encode_round
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import NodeInfo, Round
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world.group import Group
from tests.library.nodes import RemoteNode
from tests.support import processes
from tests.support.servers import EtcdServer

LIMIT_S = 120.0
PREFIX = "/rdzv_etcd"


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object that it printed, without its version."""
        (line,) = self.out.splitlines()
        told = json.loads(line)
        assert told.pop("version") == 1
        return told


Run = Callable[..., Done]
"""Takes the command's words; see the fixture ``cli``."""


def run_here(capsys: Any, words: Sequence[str]) -> Done:
    capsys.readouterr()
    code = run([str(word) for word in words])
    written = capsys.readouterr()
    return Done(code, written.out, written.err)


def run_alone(
    *words: str,
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Done:
    """Run it in a process of its own, without a terminal."""
    return run_python("-m", "rdzv_etcd", *words, environ=environ, limit_s=limit_s)


PROGRAM = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from rdzv_etcd.cli import main; "
PROGRAM += "sys.exit(main())"
"""Run the program with the packages in the folder that is the first argument."""


def run_python(
    *words: str,
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Done:
    """Run Python with these words, by the command ``before``."""
    done = processes.run([*before, sys.executable, *words], limit_s=limit_s, env=environ or {})
    return Done(done.returncode, done.stdout, done.stderr)


def site_without(folder: Path, *missing: str) -> Path:
    """Link what this Python has installed, but for some packages, and for the record that rdzv-etcd
    is installed."""
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "rdzv_etcd" not in entry.name and not entry.name.startswith(("__editable__", *missing)):
            (folder / entry.name).symlink_to(entry)
    (folder / "rdzv_etcd").symlink_to(Path(rdzv_etcd.__file__).parent)
    return folder


@contextmanager
def nothing_is_written(server: EtcdServer, job: str) -> Iterator[None]:
    """No key of the job changes, and no lease comes. What others left there before may go."""
    root = JobKeys(PREFIX, job).root
    keys, leases = server.gateway.keys(root), server.leases()
    yield
    assert server.gateway.keys(root) == keys
    assert server.leases() <= leases


@contextmanager
def reader(server: EtcdServer, job: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be a user who may only read under the prefix."""
    call, name = server.gateway.call, f"reader-{job}"
    call("/v3/auth/user/add", {"name": name, "password": "x"})
    call("/v3/auth/role/add", {"name": name})
    call("/v3/auth/user/grant", {"user": name, "role": name})
    server.gateway.grant_prefix(name, b"/rdzv_etcd/", "READ")
    with monkeypatch.context() as patch:
        patch.setenv("RDZV_ETCD_USER", name)
        patch.setenv("RDZV_ETCD_PASSWORD", "x")
        yield


def lease(server: EtcdServer, ttl_s: int = 600) -> int:
    return int(server.gateway.call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"])


def form_and_lose(node: Group, other: RemoteNode) -> str:
    """Form a world of both and kill the other one's process; return that one's id."""
    lost_id = other.node_id
    begin = threading.Thread(target=node.join)
    begin.start()
    other.call("join")
    begin.join()
    other.process.kill()
    other.process.wait()
    return lost_id


def plant_node(server: EtcdServer, job: str, node_id: str, **fields: Any) -> NodeInfo:
    """Write the presence of a node of another host, on a lease of its own."""
    info = NodeInfo(
        **{
            "node_id": node_id,
            "address": "192.0.2.7",
            "port": 1,
            "arrived_for": 1,
            "settings": JobSettings(1, 2),
            **fields,
        }
    )
    server.gateway.put(JobKeys(PREFIX, job).node(node_id), encode_node(info), lease(server))
    return info


def plant_round(
    server: EtcdServer, job: str, members: Sequence[str], **fields: Any
) -> tuple[Round, int]:
    """Write the record of a world; returns it and its job lease."""
    job_lease = lease(server)
    record = Round(
        **{
            "number": 1,
            "run": "run",
            "members": tuple(members),
            "settings": JobSettings(1, max(2, len(members))),
            "master_address": "192.0.2.7",
            "master_port": 1,
            "job_lease": job_lease,
            **fields,
        }
    )
    server.gateway.put(JobKeys(PREFIX, job).round, encode_round(record), job_lease)
    return record, job_lease
