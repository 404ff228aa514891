"""Warnings before and errors after a failed first contact; other servers that answer on the port.

Which scheme an etcd speaks is asked in ``test_tls.py``, and by the doctor.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

import rdzv_etcd
from rdzv_etcd.errors import EtcdError, EtcdUnavailableError, InvalidRequestError
from rdzv_etcd.etcd import first_contact
from rdzv_etcd.etcd.first_contact import look
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.settings.connection import Connection, Endpoint, Tls
from tests.etcd.tools import client_of, failure
from tests.support.servers import EtcdServer

LOOK_AFTER_S = 0.5
LATER_S = LOOK_AFTER_S + 2
SHORT_S = 0.2


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "LOOK_AFTER_S", LOOK_AFTER_S)
    monkeypatch.setattr(first_contact, "_STEP_S", 0.5)


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


async def test_what_fails_before_is_not_logged_as_well(
    closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert "connection refused" in str(await failure(closed, connect_timeout_s=SHORT_S))
    assert caplog.records == []


@pytest.mark.parametrize("tls", [None, Tls()], ids=["http", "https"])
async def test_a_silent_endpoint_is_not_said_to_speak_another_scheme(
    silent: Endpoint, tls: Tls | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "speaks" not in str(await failure(silent, tls=tls, connect_timeout_s=SHORT_S))
    assert await look(Connection((silent,), tls)) == []
    assert caplog.records == []


async def test_an_endpoint_with_the_wrong_scheme_is_named_among_others(
    tls_etcd: EtcdServer, closed: Endpoint
) -> None:
    error = str(await failure(closed, tls_etcd, connect_timeout_s=1.0))
    assert error.startswith(f"{tls_etcd.target} speaks https, not http: use https://")
    assert "connection refused" in error


async def test_a_contact_in_time_is_not_logged(
    etcd_server: EtcdServer, closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Also over an endpoint that is the first to answer of several."""
    async with client_of(closed, etcd_server) as client:
        await client.connect()
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


@pytest.mark.parametrize(
    ("serving", "limit_s", "kind", "text"),
    [
        pytest.param(http1, 1.0, EtcdUnavailableError, "it answers, but is not etcd", id="web"),
        pytest.param(
            another_grpc,
            600.0,  # it is reported at once
            InvalidRequestError,
            "this server does not offer etcd's v3 API",
            id="another gRPC server",
        ),
    ],
)
async def test_another_kind_of_server_is_not_taken_for_an_etcd(
    serving: Callable[[], AbstractContextManager[int]],
    limit_s: float,
    kind: type[EtcdError],
    text: str,
) -> None:
    with serving() as port:
        error = await failure(Endpoint("127.0.0.1", port), connect_timeout_s=limit_s)
    assert isinstance(error, kind)
    assert f"http://127.0.0.1:{port}: {text}" in str(error)
