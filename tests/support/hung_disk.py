"""Makes the disk of one etcd hang, as a stalled volume does: no write is ever through.

Otherwise the member works: it answers pings, forwards what it is asked to the others, and applies
nothing any more.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support.servers import EtcdServer

_HANG_S = 3600
"""Longer than any test."""

REAL_FSYNC = ("--unsafe-no-fsync=false",)
"""With this flag an etcd of the tests asks its disk at all."""


@contextmanager
def hung_disk(server: EtcdServer) -> Iterator[None]:
    """Let the disk of ``server`` hang meanwhile; it must run with :data:`REAL_FSYNC`."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    delay = f"delay_enter={_HANG_S * 1_000_000}"
    command = ["strace", "-f", "-p", str(server.pid), "-o", "/dev/null"]
    command += ["-e", "trace=fsync,fdatasync", "-e", f"inject=fsync,fdatasync:{delay}"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        first = tracer.stderr.readline()
        if "attached" not in first:
            pytest.skip(f"strace may not trace here: {first.strip()}")
        yield
        assert tracer.poll() is None, "strace has ended, and the disk hangs no more"
    finally:
        tracer.terminate()
        tracer.communicate()


def connected_to(pid: int, servers: list[EtcdServer]) -> list[EtcdServer]:
    """Return to which of the servers a process has connections."""
    established = psutil.Process(pid).net_connections("tcp")
    ports = {one.raddr.port for one in established if one.raddr and one.status == "ESTABLISHED"}
    return [server for server in servers if server.port in ports]
