"""What is said while there is no contact with etcd, and when that has failed.

Which scheme an etcd speaks is asked in ``test_tls.py``, and by the doctor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import rdzv_etcd
from rdzv_etcd.errors import EtcdUnavailableError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.first_contact import LOOK_AFTER_S, look
from rdzv_etcd.settings.connection import Connection, Endpoint, Tls
from tests.etcd.tools import run
from tests.support.processes import free_port
from tests.support.servers import EtcdServer

LATER_S = LOOK_AFTER_S + 3
SHORT_S = 0.2


def fail(*endpoints: Endpoint, tls: Tls | None = None, connect_timeout_s: float) -> str:
    async def scenario() -> str:
        client = EtcdClient(Connection(endpoints, tls, connect_timeout_s=connect_timeout_s))
        try:
            with pytest.raises(EtcdUnavailableError) as failed:
                await client.connect()
            return str(failed.value)
        finally:
            await client.close()

    return run(scenario())


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """Accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def closed() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


def test_what_is_wrong_is_logged_long_before_the_error(
    closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = Endpoint("no-such-host.invalid")
    error = fail(closed, unknown, connect_timeout_s=LATER_S)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"no contact with etcd for {LOOK_AFTER_S:g} s, of {LATER_S:g}: {closed.target}: connection "
        f"refused - is etcd running there?; {unknown.target}: the host name cannot be resolved"
    )
    assert "connection refused" in error
    assert "cannot be resolved" in error


def test_what_fails_before_is_not_logged_as_well(
    closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert "connection refused" in fail(closed, connect_timeout_s=SHORT_S)
    assert caplog.records == []


@pytest.mark.parametrize("tls", [None, Tls()], ids=["http", "https"])
def test_what_says_nothing_speaks_nothing(
    silent: Endpoint, tls: Tls | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "speaks" not in fail(silent, tls=tls, connect_timeout_s=SHORT_S)
    assert run(look(Connection((silent,), tls))) == []
    assert caplog.records == []


def test_an_endpoint_with_the_wrong_scheme_is_named_among_others(
    tls_etcd: EtcdServer, closed: Endpoint
) -> None:
    wrong = Endpoint(tls_etcd.host, tls_etcd.port)
    error = fail(closed, wrong, connect_timeout_s=LATER_S)
    assert error.startswith(f"{wrong.target} speaks https, not http: use https://")
    assert "connection refused" in error


def test_contact_says_nothing(etcd_server: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    """Also over an endpoint that is the first to answer of several."""

    async def scenario() -> None:
        here = Endpoint(etcd_server.host, etcd_server.port)
        client = EtcdClient(Connection((Endpoint("127.0.0.1", free_port()), here)))
        await client.connect()
        await client.close()

    run(scenario())
    assert caplog.records == []


@pytest.mark.parametrize("door", ["connect", "observe"])
def test_every_door_of_the_library_explains_it(etcd_server: EtcdServer, door: str) -> None:
    given = {"job": "a", "connect_timeout": SHORT_S} | ({"nodes": 1} if door == "connect" else {})
    with pytest.raises(EtcdUnavailableError, match="speaks http, not https: use http://"):
        getattr(rdzv_etcd, door)(f"https://{etcd_server.target}", **given)
