"""The tests' own servers and the leak check: their failures would go unnoticed elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer

FreshEtcd = Callable[..., EtcdServer]


def test_a_server_outlives_the_thread_that_started_it(fresh_etcd: FreshEtcd) -> None:
    server = fresh_etcd()
    server.stop()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.2)  # the signal, if there were one, would come now
    assert server.running
    assert server.leases() == set()


def test_metrics_count_requests(etcd_server: EtcdServer) -> None:
    before = etcd_server.metrics().requests().get("Range", 0)
    etcd_server.keys(b"nothing-here")
    assert etcd_server.metrics().requests()["Range"] == before + 1


def test_a_server_dies_with_the_process_that_started_it(
    fresh_etcd: FreshEtcd, tmp_path: Path
) -> None:
    binary = fresh_etcd().binary
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tests.support.servers import EtcdBinary, EtcdServer\n"
        "server = EtcdServer(EtcdBinary(Path(sys.argv[1]), 'x'), Path(sys.argv[2]))\n"
        "print(server.start_on_free_ports().pid, flush=True); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(binary.path), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        os.kill(starter.pid, signal.SIGKILL)
        # Where nothing reaps orphans, the dead server stays as a zombie.
        deadline = time.monotonic() + 30
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the server outlived its starter"
            time.sleep(0.02)


def test_the_leak_check_finds_threads_sockets_keys_and_leases(
    etcd_server: EtcdServer, job_id: str
) -> None:
    root = f"/rdzv_etcd/{job_id}/".encode()

    def fresh_check() -> LeakCheck:
        check = LeakCheck(timeout_s=0.1)
        check.watch_job(etcd_server.gateway, job_id)
        return check

    check = fresh_check()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left-behind")
    thread.start()
    with pytest.raises(AssertionError, match="left-behind"):
        check.check()
    done.set()
    thread.join()
    check.check()

    check = fresh_check()
    with socket.create_server(("127.0.0.1", 0)), pytest.raises(AssertionError, match="sockets"):
        check.check()

    check = fresh_check()
    lease_id = int(etcd_server.gateway.call("/v3/lease/grant", {"TTL": "60"})["ID"])
    with pytest.raises(AssertionError, match="leases"):
        check.check()
    etcd_server.gateway.put(root + b"ctl/round", b"closed", lease_id)
    check.check()  # the closed marker and its lease may stay
    etcd_server.gateway.put(root + b"nodes/a", b"")
    with pytest.raises(AssertionError, match="nodes/a"):
        check.check()
    etcd_server.gateway.delete_prefix(root)
    etcd_server.gateway.revoke(lease_id)
    check.check()
