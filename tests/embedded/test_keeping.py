"""How long an embedded etcd stays."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.binary import Binary
from rdzv_etcd.embedded.child import lease_age_s
from rdzv_etcd.embedded.launch import Wait, launch
from tests.embedded.agents import LIMIT_S, environment, grant, settings, wait_for_end
from tests.library.nodes import wait_until
from tests.support.servers import EtcdBinary, EtcdServer


def test_a_lease_without_end_that_nobody_renews_does_not_keep_it(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object
) -> None:
    """It once kept it for as long as the machine ran."""
    started = launch(
        settings(f"127.0.0.1:{port}", lease_ttl=2),
        Binary(etcd_binary.path, etcd_binary.version),
        ("127.0.0.1",),
        environment(etcd_binary.path, scratch),
        Wait("etcd", f"127.0.0.1:{port}", LIMIT_S),
        stale_after_s=2,
    )
    assert started is not None
    supervisor = psutil.Process(started.supervisor_pid)
    grant(port, 1_000_000_000)
    wait_for_end(supervisor)
    assert list(scratch.iterdir()) == []


def test_a_lease_is_as_old_as_its_last_renewal(etcd_server: EtcdServer) -> None:
    gateway = etcd_server.gateway
    lease = str(grant(etcd_server.port, 1000))

    def age_s() -> int:
        age = lease_age_s(gateway.call("/v3/lease/timetolive", {"ID": lease}))
        assert age is not None
        return age

    wait_until("the lease is older than a second", lambda: age_s() > 1)

    def renewed_age_s() -> int:
        gateway.call("/v3/lease/keepalive", {"ID": lease})
        return age_s()

    wait_until("it is young again", lambda: renewed_age_s() <= 1)
    gateway.revoke(int(lease))
    assert lease_age_s(gateway.call("/v3/lease/timetolive", {"ID": lease})) is None


@pytest.mark.parametrize(("parent", "said"), [("os.getppid()", "it runs\n"), ("os.getpid()", "")])
def test_an_etcd_does_not_begin_once_its_supervisor_is_gone(parent: str, said: str) -> None:
    """Killed between the fork and the tie to it, it once left an etcd that nothing ended."""
    program = f"""
        import ctypes, os
        from rdzv_etcd.embedded.child import tie_to_parent
        tie_to_parent(ctypes.CDLL(None).prctl, {parent})
        print("it runs")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.returncode) == (said, 0 if said else 1)
