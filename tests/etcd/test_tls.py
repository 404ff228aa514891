"""TLS: which certificates are trusted, and what errors about files and handshakes name."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdError, EtcdTlsError, EtcdUnavailableError, SettingsError
from rdzv_etcd.etcd.auth import channel_credentials
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.settings.connection import Tls
from tests.etcd.tools import LIMIT_S, client_of, connection, failure, put
from tests.support.certificates import Certificates, make_certificates
from tests.support.servers import EtcdServer


@pytest.mark.parametrize("form", ["pair", "combined"])
async def test_a_client_certificate_opens_the_door(
    mtls_etcd: EtcdServer, certificates: Certificates, form: str
) -> None:
    if form == "pair":
        tls = Tls(certificates.ca, certificates.client_cert, certificates.client_key)
    else:
        tls = Tls(certificates.ca, certificates.client_combined)
    async with client_of(mtls_etcd, tls=tls) as client:
        lease = await client.grant(60)
        assert (await client.txn(put(b"tls", b"", lease.lease_id))).succeeded
        assert await client.keep_alive(lease.lease_id) == 60
        await client.revoke(lease.lease_id)


async def test_a_ca_is_enough_where_no_client_certificate_is_wanted(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    async with client_of(tls_etcd, tls=Tls(certificates.ca)) as client:
        await client.connect()


async def test_without_a_ca_the_systems_roots_are_trusted(
    tls_etcd: EtcdServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    async with client_of(tls_etcd, tls=Tls()) as client:
        await client.connect()
    monkeypatch.delenv("SSL_CERT_FILE")
    assert isinstance(await failure(tls_etcd, tls=Tls()), EtcdTlsError)


async def test_a_foreign_ca_is_named_as_the_cause(
    tls_etcd: EtcdServer, certificates: Certificates
) -> None:
    error = await failure(tls_etcd, tls=Tls(certificates.foreign_ca))
    assert isinstance(error, EtcdTlsError)
    assert "certificate verify failed - check ca_cert" in str(error)
    assert tls_etcd.endpoint in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("made", "limit_s", "error_type", "named"),
    [
        ({"hosts": ("etcd.example",)}, LIMIT_S, EtcdTlsError, "another host name"),
        ({"expired": ("server",)}, LIMIT_S, EtcdTlsError, "the server's certificate has expired"),
        ({"expired": ("client",)}, 3.0, EtcdError, "client certificate.*expired"),
    ],
)
async def test_the_certificate_that_is_wrong_is_named(
    fresh_etcd: Callable[..., EtcdServer],
    tmp_path: Path,
    made: dict[str, Any],
    limit_s: float,
    error_type: type[EtcdError],
    named: str,
) -> None:
    files = make_certificates(tmp_path / "files", **made)
    server = fresh_etcd(certificates=files, require_client_cert=True)
    tls = Tls(files.ca, files.client_cert, files.client_key)
    error = await failure(server, tls=tls, connect_timeout_s=limit_s)
    assert isinstance(error, error_type)
    assert re.search(named, str(error))


async def test_tls_to_a_server_without_it_is_named(
    etcd_server: EtcdServer, certificates: Certificates
) -> None:
    error = await failure(etcd_server, tls=Tls(certificates.ca), connect_timeout_s=1.0)
    assert str(error).startswith(f"{etcd_server.target} speaks http, not https: use http://")


async def test_no_tls_to_a_server_with_it_is_hinted_at(tls_etcd: EtcdServer) -> None:
    error = await failure(tls_etcd, connect_timeout_s=1.0)
    assert isinstance(error, EtcdUnavailableError)
    assert str(error).startswith(f"{tls_etcd.target} speaks https, not http: use https://")
    assert list(error.endpoints) == [f"http://{tls_etcd.target}"]


async def test_a_missing_or_foreign_client_certificate_is_named(
    mtls_etcd: EtcdServer, certificates: Certificates
) -> None:
    foreign = Tls(certificates.ca, certificates.foreign_cert, certificates.foreign_key)
    for tls in (Tls(certificates.ca), foreign):
        error = await failure(mtls_etcd, tls=tls, connect_timeout_s=3.0)
        assert "client certificate" in str(error)
        assert mtls_etcd.endpoint in str(error)
        assert "speaks" not in str(error)
    assert "speaks https, not http" in str(await failure(mtls_etcd, connect_timeout_s=1.0))


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


async def test_one_endpoint_with_a_good_certificate_is_enough(
    tls_etcd: EtcdServer, etcd_server: EtcdServer, certificates: Certificates
) -> None:
    async with client_of(etcd_server, tls_etcd, tls=Tls(certificates.ca)) as client:
        await asyncio.wait_for(client.connect(), 30)
