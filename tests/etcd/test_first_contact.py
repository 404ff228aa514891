"""Warnings before and errors after a failed first contact; other servers that answer on the port.

Which scheme an etcd speaks is asked in ``test_tls.py``, and by the doctor.
"""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import rdzv_etcd
from rdzv_etcd.errors import EtcdError, EtcdUnavailableError, InvalidRequestError
from rdzv_etcd.etcd import first_contact
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.first_contact import look
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.settings.connection import Connection, Endpoint, Tls
from tests.etcd.tools import awaited
from tests.support.processes import free_port
from tests.support.servers import EtcdServer

LOOK_AFTER_S = 0.5
LATER_S = LOOK_AFTER_S + 2
SHORT_S = 0.2


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "LOOK_AFTER_S", LOOK_AFTER_S)
    monkeypatch.setattr(first_contact, "_STEP_S", 0.5)


async def failure(
    *endpoints: Endpoint, tls: Tls | None = None, connect_timeout_s: float
) -> EtcdError:
    client = EtcdClient(Connection(endpoints, tls, connect_timeout_s=connect_timeout_s))
    try:
        with pytest.raises(EtcdError) as failed:
            await client.connect()
        return failed.value
    finally:
        await client.close()


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """A port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def closed() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@awaited
async def test_what_is_wrong_is_logged_long_before_the_error(
    closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Endpoint("no-such-host.invalid")
    error = str(await failure(closed, unknown, connect_timeout_s=LATER_S))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"no contact with etcd for {LOOK_AFTER_S:g} s, of {LATER_S:g}: {closed.target}: connection "
        f"refused - is etcd running there?; {unknown.target}: the host name cannot be resolved"
    )
    assert "connection refused" in error
    assert "cannot be resolved" in error


@awaited
async def test_what_fails_before_is_not_logged_as_well(
    closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert "connection refused" in str(await failure(closed, connect_timeout_s=SHORT_S))
    assert caplog.records == []


@pytest.mark.parametrize("tls", [None, Tls()], ids=["http", "https"])
@awaited
async def test_a_silent_endpoint_is_not_said_to_speak_another_scheme(
    silent: Endpoint, tls: Tls | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "speaks" not in str(await failure(silent, tls=tls, connect_timeout_s=SHORT_S))
    assert await look(Connection((silent,), tls)) == []
    assert caplog.records == []


@awaited
async def test_an_endpoint_with_the_wrong_scheme_is_named_among_others(
    tls_etcd: EtcdServer, closed: Endpoint
) -> None:
    wrong = Endpoint(tls_etcd.host, tls_etcd.port)
    error = str(await failure(closed, wrong, connect_timeout_s=1.0))
    assert error.startswith(f"{wrong.target} speaks https, not http: use https://")
    assert "connection refused" in error


@awaited
async def test_a_contact_in_time_is_not_logged(
    etcd_server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also over an endpoint that is the first to answer of several."""
    here = Endpoint(etcd_server.host, etcd_server.port)
    client = EtcdClient(Connection((Endpoint("127.0.0.1", free_port()), here)))
    await client.connect()
    await client.close()
    assert caplog.records == []


@pytest.mark.parametrize("door", ["connect", "observe"])
def test_every_door_of_the_library_explains_it(etcd_server: EtcdServer, door: str) -> None:
    given = {"job": "a", "connect_timeout": SHORT_S} | ({"nodes": 1} if door == "connect" else {})
    with pytest.raises(EtcdUnavailableError, match="speaks http, not https: use http://"):
        getattr(rdzv_etcd, door)(f"https://{etcd_server.target}", **given)


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextmanager
def http1() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def another_grpc() -> Iterator[int]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def at(port: int) -> Endpoint:
    return Endpoint("127.0.0.1", port)


@awaited
async def test_a_web_server_is_not_taken_for_an_etcd() -> None:
    with http1() as port:
        error = await failure(at(port), connect_timeout_s=1.0)
    assert isinstance(error, EtcdUnavailableError)
    assert f"http://127.0.0.1:{port}: it answers, but is not etcd" in str(error)


@awaited
async def test_another_grpc_server_is_reported_at_once_with_its_endpoint() -> None:
    with another_grpc() as port:
        error = await failure(at(port), connect_timeout_s=600.0)
    assert isinstance(error, InvalidRequestError)
    assert f"http://127.0.0.1:{port}: this server does not offer etcd's v3 API" in str(error)
