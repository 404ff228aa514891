"""TLS: who is trusted, what a wrong file is called, and which hint a failed handshake gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv_etcd.errors import EtcdError, EtcdTlsError, EtcdUnavailableError, SettingsError
from rdzv_etcd.etcd.auth import channel_credentials
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.settings.connection import Tls
from tests.etcd.tools import LIMIT_S, awaited, client_of, connection, put, run
from tests.support.certificates import Certificates, make_certificates
from tests.support.servers import EtcdServer


def failure(server: EtcdServer, tls: Tls | None, connect_timeout_s: float = 30.0) -> EtcdError:
    """The error of the first contact, which must come well before the timeout."""

    async def scenario() -> EtcdError:
        async with client_of(server, tls=tls, connect_timeout_s=connect_timeout_s) as client:
            with pytest.raises(EtcdError) as failed:
                await client.connect()
            return failed.value

    return run(scenario())


@pytest.mark.parametrize("form", ["pair", "combined"])
def test_a_client_certificate_opens_the_door(
    mtls_etcd: EtcdServer, certificates: Certificates, form: str
) -> None:
    if form == "pair":
        tls = Tls(certificates.ca, certificates.client_cert, certificates.client_key)
    else:
        tls = Tls(certificates.ca, certificates.client_combined)

    async def scenario() -> None:
        async with client_of(mtls_etcd, tls=tls) as client:
            lease = await client.grant(60)
            assert (await client.txn(put(b"tls", b"", lease.lease_id))).succeeded
            assert await client.keep_alive(lease.lease_id) == 60
            await client.revoke(lease.lease_id)

    run(scenario())


@awaited
async def test_a_ca_is_enough_where_no_client_certificate_is_wanted(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    async with client_of(tls_etcd, tls=Tls(certificates.ca)) as client:
        await client.connect()


def test_without_a_ca_the_systems_roots_are_trusted(
    tls_etcd: EtcdServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))

    async def scenario() -> None:
        async with client_of(tls_etcd, tls=Tls()) as client:
            await client.connect()

    run(scenario())
    monkeypatch.delenv("SSL_CERT_FILE")
    assert isinstance(failure(tls_etcd, Tls()), EtcdTlsError)


def test_a_foreign_ca_is_named_as_the_cause(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    error = failure(tls_etcd, Tls(certificates.foreign_ca))
    assert isinstance(error, EtcdTlsError)
    assert "certificate verify failed - check ca_cert" in str(error)
    assert tls_etcd.endpoint in str(error)
    assert "\n" not in str(error)


def test_a_certificate_for_another_host_is_told_at_once(
    fresh_etcd: Callable[..., EtcdServer], tmp_path: Path
) -> None:
    files = make_certificates(tmp_path / "elsewhere", hosts=("etcd.example",))
    error = failure(fresh_etcd(certificates=files), Tls(files.ca), connect_timeout_s=LIMIT_S)
    assert isinstance(error, EtcdTlsError)
    assert "another host name" in str(error)


def test_an_expired_certificate_of_the_server_is_told(
    fresh_etcd: Callable[..., EtcdServer], tmp_path: Path
) -> None:
    files = make_certificates(tmp_path / "expired", expired=("server",))
    error = failure(fresh_etcd(certificates=files), Tls(files.ca), connect_timeout_s=LIMIT_S)
    assert isinstance(error, EtcdTlsError)
    assert "the server's certificate has expired" in str(error)


def test_an_expired_client_certificate_is_hinted_at(
    fresh_etcd: Callable[..., EtcdServer], tmp_path: Path
) -> None:
    files = make_certificates(tmp_path / "expired", expired=("client",))
    server = fresh_etcd(certificates=files, require_client_cert=True)
    tls = Tls(files.ca, files.client_cert, files.client_key)
    error = failure(server, tls, connect_timeout_s=5.0)
    assert "client certificate" in str(error)
    assert "expired" in str(error)


def test_tls_to_a_server_without_it_is_named(
    etcd_server: EtcdServer, certificates: Certificates
) -> None:
    error = failure(etcd_server, Tls(certificates.ca), connect_timeout_s=3.0)
    assert str(error).startswith(f"{etcd_server.target} speaks http, not https: use http://")


def test_no_tls_to_a_server_with_it_is_hinted_at(tls_etcd: EtcdServer) -> None:
    error = failure(tls_etcd, None, connect_timeout_s=3.0)
    assert isinstance(error, EtcdUnavailableError)
    assert str(error).startswith(f"{tls_etcd.target} speaks https, not http: use https://")
    assert list(error.endpoints) == [f"http://{tls_etcd.target}"]


def test_a_missing_or_foreign_client_certificate_is_named(
    mtls_etcd: EtcdServer, certificates: Certificates
) -> None:
    foreign = Tls(certificates.ca, certificates.foreign_cert, certificates.foreign_key)
    for tls in (Tls(certificates.ca), foreign):
        error = failure(mtls_etcd, tls, connect_timeout_s=5.0)
        assert "client certificate" in str(error)
        assert mtls_etcd.endpoint in str(error)
        assert "speaks" not in str(error)
    assert "speaks https, not http" in str(failure(mtls_etcd, None, connect_timeout_s=3.0))


def test_what_is_no_file_is_refused_in_bounded_time_and_memory(
    certificates: Certificates, tmp_path: Path
) -> None:
    pipe, large = tmp_path / "pipe.pem", tmp_path / "large.pem"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file takes no room
    files, zero = certificates, Path("/dev/zero")
    for source, problem in ((pipe, "is a pipe"), (zero, "is a device"), (large, "is larger than")):
        for tls in (
            Tls(source),
            Tls(files.ca, source, files.client_key),
            Tls(files.ca, files.client_cert, source),
        ):
            with pytest.raises(EtcdTlsError, match=f"{source} {problem}"):
                channel_credentials(tls)


def test_unusable_files_are_named_at_once(
    etcd_server: EtcdServer, certificates: Certificates, tmp_path: Path
) -> None:
    files = certificates
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("hello")
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    for tls, file, problem in (
        (Tls(missing), missing, "No such file"),
        (Tls(text), text, "not a PEM certificate"),
        (Tls(files.ca, missing), missing, "No such file"),
        (Tls(files.ca, text), text, "not a PEM certificate"),
        (Tls(files.ca, files.client_cert), files.client_cert, "no PEM private key"),
        (Tls(files.ca, files.client_cert, missing), missing, "No such file"),
        (Tls(files.ca, files.client_cert, text), text, "no PEM private key"),
        (Tls(files.ca, files.client_cert, files.foreign_key), files.foreign_key, "not belong"),
        (Tls(files.ca, files.client_cert, encrypted), encrypted, "encrypted"),
    ):
        with pytest.raises(EtcdTlsError, match=problem) as refused:
            EtcdClient(connection(etcd_server, tls=tls))
        assert str(file) in str(refused.value)
    with pytest.raises(SettingsError, match="without its certificate"):
        EtcdClient(connection(etcd_server, tls=Tls(files.ca, None, files.client_key)))


@awaited
async def test_one_endpoint_with_a_good_certificate_is_enough(
    tls_etcd: EtcdServer, etcd_server: EtcdServer, certificates: Certificates
) -> None:
    async with client_of(etcd_server, tls_etcd, tls=Tls(certificates.ca)) as client:
        await asyncio.wait_for(client.connect(), 30)
