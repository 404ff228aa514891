"""Certificates and passwords that are replaced on disk while a client runs."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdAuthError, EtcdError
from rdzv_etcd.etcd import auth
from rdzv_etcd.etcd.auth import Rotated
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.settings.connection import Credentials, Tls
from tests.etcd.test_watch import names
from tests.etcd.tools import END, LIMIT_S, PREFIX, client_of, in_background, put, soon
from tests.support.certificates import Certificates, make_certificates
from tests.support.hung_disk import hung_folder
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


@pytest.fixture
def installed(tmp_path: Path) -> Certificates:
    """Certificates of this test's own."""
    return make_certificates(tmp_path / "installed")


def replace(installed: Certificates, folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Put new files, of another authority, in the old ones' places."""
    fresh = make_certificates(folder)
    for field in fields(Certificates):
        if field.name not in but:
            shutil.copy2(getattr(fresh, field.name), getattr(installed, field.name))


def end_of_readings() -> None:
    for thread in threading.enumerate():
        if thread.name == "rdzv-etcd secret":
            thread.join(LIMIT_S)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def test_certificates_replaced_on_disk_serve_the_next_connection(
    fresh_etcd: Callable[..., EtcdServer], installed: Certificates, tmp_path: Path
) -> None:
    server = fresh_etcd(certificates=installed, require_client_cert=True)
    tls = Tls(installed.ca, installed.client_cert, installed.client_key)
    async with client_of(server, tls=tls) as client:
        lease = await client.grant(60)
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        assert await client.keep_alive(lease.lease_id) == 60
        await in_background(server.stop)
        replace(installed, tmp_path / "fresh")
        await in_background(server.start)
        await client.txn(put(b"after"), repeatable=True, timeout_s=LIMIT_S)
        assert await client.keep_alive(lease.lease_id, timeout_s=LIMIT_S) > 0
        assert await names(watch, 1) == [b"after"]


async def test_files_that_are_replaced_one_by_one_are_used_when_they_fit(
    fresh_etcd: Callable[..., EtcdServer],
    installed: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = fresh_etcd(certificates=installed, require_client_cert=True)
    old_key = tmp_path / "old.pem"
    shutil.copy2(installed.client_key, old_key)
    tls = Tls(installed.ca, installed.client_cert, installed.client_key)
    async with client_of(server, tls=tls, request_timeout_s=LIMIT_S) as client:
        await client.connect()
        await in_background(server.stop)
        replace(installed, tmp_path / "fresh", but=("client_key",))
        await in_background(server.start)
        with pytest.raises(EtcdError):
            await client.get(Get(PREFIX), timeout_s=2)
        (warning,) = warnings(caplog)
        assert f"{installed.client_key} does not belong to" in warning
        shutil.copy2(tmp_path / "fresh" / "client_key.pem", installed.client_key)
        await client.get(Get(PREFIX))


async def test_who_asks_at_once_shares_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_READ_LIMIT_S", LIMIT_S)
    begun: list[object] = []

    def read(before: object) -> object:
        begun.append(before)
        time.sleep(0.05)
        return object()

    files = Rotated[object](read, object(), "kept", SystemClock())
    first, *others = await asyncio.gather(*(files.latest() for _ in range(20)))
    assert begun[1:] == [first]  # by the first to ask, and for all the others
    assert set(others) == {files.current}


async def test_what_is_read_too_late_is_used_the_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auth, "_READ_LIMIT_S", 0.1)
    answers = [threading.Event() for _ in range(3)]
    begun: list[int] = []

    def read(before: int) -> int:
        begun.append(before)
        answers[len(begun) - 1].wait(LIMIT_S)
        return before + 1

    files = Rotated(read, 0, "kept", SystemClock())
    assert await files.latest() == 0
    for number, answer in enumerate(answers[:-1]):
        assert await files.latest() == number  # it does not wait once more
        answer.set()
        await in_background(end_of_readings)
        assert await files.latest() == number + 1
    answers[-1].set()
    assert warnings(caplog) == [f"kept: {auth._HANGS}"]


async def test_files_on_a_file_system_that_hangs_are_kept_and_read_when_it_is_back(
    fresh_etcd: Callable[..., EtcdServer],
    installed: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The event loop, which renews leases, does not wait for it."""
    server = fresh_etcd(certificates=installed, require_client_cert=True)
    server.enable_auth()
    mounted = tmp_path / "mounted"
    shutil.copytree(installed.ca.parent, mounted)
    ca, cert, key = (
        mounted / path.name for path in (installed.ca, installed.client_cert, installed.client_key)
    )
    (mounted / "password").write_text(USER_PASSWORD)
    login = Credentials(USER, USER_PASSWORD, None, mounted / "password")
    async with client_of(
        server, tls=Tls(ca, cert, key), credentials=login, request_timeout_s=LIMIT_S
    ) as client:
        await client.txn(put(b"before"))
        with hung_folder(mounted):
            for _ in range(2):
                await in_background(server.restart)
                await client.txn(put(b"meanwhile"), repeatable=True)
        for kept in ("TLS still uses the files as they were", "logging in to etcd with the user"):
            (warning,) = (text for text in warnings(caplog) if kept in text)
            assert "their file system does not answer" in warning
        await in_background(end_of_readings)
        await in_background(server.stop)
        replace(installed, tmp_path / "fresh")
        for path in (ca, cert, key):
            shutil.copy2(installed.ca.parent / path.name, path)
        await in_background(server.start)
        await client.txn(put(b"after"), repeatable=True)


@pytest.mark.slow
async def test_a_password_that_was_changed_is_read_again(
    server: EtcdServer, tmp_path: Path
) -> None:
    server.enable_auth()
    file = tmp_path / "password"
    file.write_text(USER_PASSWORD)
    login = Credentials(USER, USER_PASSWORD, None, file)
    async with client_of(server, credentials=login) as client:
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        for n in range(2):
            file.write_text(f"changed {n}\n")
            body = {"name": USER, "password": f"changed {n}"}
            await in_background(lambda: server.gateway.call("/v3/auth/user/changepw", body))  # noqa: B023
            await in_background(server.restart)  # streams need a token again, too
            await client.txn(put(b"%d" % n))
            assert await names(watch, 1) == [b"%d" % n]


async def test_a_login_whose_file_is_gone_keeps_the_previous_password(
    server: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.enable_auth()
    login = Credentials(USER, USER_PASSWORD, None, tmp_path / "gone")
    async with client_of(server, credentials=login) as client:
        await client.txn(put(b"1"))
    (warning,) = warnings(caplog)
    assert "cannot be read" in warning
    assert str(tmp_path / "gone") in warning


async def test_the_first_refusal_of_a_keep_alive_is_a_warning(
    server: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.enable_auth()
    file = tmp_path / "password"
    file.write_text("not yet")
    login = Credentials(USER, "", None, file)
    async with client_of(server, credentials=login) as client:
        for _ in range(3):
            with pytest.raises(EtcdAuthError):
                await soon(client.keep_alive(4711))
        (warning,) = warnings(caplog)
        assert "etcd refuses to renew" in warning
        assert server.endpoint in warning
        assert "not yet" not in warning
        file.write_text(USER_PASSWORD)
        assert await client.keep_alive(4711) == 0


async def test_a_certificate_that_is_refused_is_a_warning_of_the_keep_alive(
    tls_etcd: EtcdServer, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(tls_etcd, tls=Tls(certificates.foreign_ca)) as client:
        for _ in range(2):
            with pytest.raises(EtcdError):
                await client.keep_alive(4711, timeout_s=1.0)
        (warning,) = warnings(caplog)
        assert "check ca_cert" in warning
