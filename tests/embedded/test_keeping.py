"""How long an embedded etcd stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded import child
from rdzv_etcd.embedded.binary import Binary
from rdzv_etcd.embedded.child import lease_age_s
from rdzv_etcd.embedded.launch import Wait, launch
from tests.embedded.agents import LIMIT_S, environment, grant, settings, wait_for_end
from tests.embedded.conftest import Start
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


@pytest.mark.slow
def test_a_host_that_was_stopped_for_longer_than_the_grace_keeps_it(
    start: Start, port: int
) -> None:
    """As a container is that is paused: no lease outlasts that, and nodes need a moment."""
    grace_s = 12
    supervisor = start(embed_grace=grace_s)
    grant(port, 8)
    # Only lower bounds are waited for. It looks every 2 s.
    with pytest.raises(psutil.TimeoutExpired):
        supervisor.wait(5)
    stopped = [supervisor, *supervisor.children()]
    for process in stopped:
        process.suspend()
    with pytest.raises(psutil.TimeoutExpired):
        supervisor.wait(grace_s + 3)
    for process in stopped:
        process.resume()
    with pytest.raises(psutil.TimeoutExpired):
        supervisor.wait(2)
    grant(port, 2)
    wait_for_end(supervisor)


def test_cleaners_of_temporary_files_find_nothing_old(
    etcd_binary: EtcdBinary, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd's deletes what nobody has written for ten days, sockets in use as well."""
    monkeypatch.setattr(child, "_TOUCH_EVERY_S", 0)
    url = f"http://127.0.0.1:{port}"
    etcd = child.EtcdProcess(child.Plan(str(etcd_binary.path), (url,), url))
    try:
        etcd.start()
        folder = etcd._folder
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (0, 0))
        etcd.tidy()
        found = [folder, *folder.rglob("*")]
        assert folder / "client:0" in found
        assert [path for path in found if not path.lstat().st_mtime] == []
    finally:
        etcd.remove()


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
