"""Makes the disk of one etcd hang, as a stalled volume does, or a folder, as that of a dead server.

No write of such an etcd is ever through. Otherwise the member works: it answers pings, forwards
what it is asked to the others, and applies nothing any more.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def hung_folder(folder: Path) -> Iterator[None]:
    """Mount a file system there that nobody serves: whatever looks into it waits until the end."""
    libc, detach = ctypes.CDLL(None, use_errno=True), 2
    try:
        served_by = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    options = f"fd={served_by},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    place = os.fsencode(folder)
    try:
        if libc.mount(b"hung", place, b"fuse", 0, options.encode()):
            pytest.skip(f"no FUSE: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        libc.umount2(place, detach)
        os.close(served_by)  # who waits gets an error


def connected_to(pid: int, servers: list[EtcdServer]) -> list[EtcdServer]:
    """Return to which of the servers a process has connections."""
    established = psutil.Process(pid).net_connections("tcp")
    ports = {one.raddr.port for one in established if one.raddr and one.status == "ESTABLISHED"}
    return [server for server in servers if server.port in ports]
