"""Dead, silent and refusing endpoints: left for the next one, within the deadline."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import EtcdUnavailableError, OutcomeUnknownError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.settings.connection import Endpoint
from tests.etcd.tools import (
    LIMIT_S,
    PREFIX,
    InOrder,
    client_of,
    connection,
    create,
    failure,
    in_background,
    put,
)
from tests.support.servers import EtcdCluster, EtcdServer

ANY = Get(PREFIX)


async def test_refusing_and_silent_endpoints_are_left_within_the_deadline(
    etcd_server: EtcdServer, closed: Endpoint, silent: Endpoint
) -> None:
    async with client_of(closed, silent, etcd_server) as client:
        # A guarded write: it must be known that the silent endpoint never got it.
        assert (await client.txn(create(b"silent"), timeout_s=20)).revision > 0
        assert (await client.get(ANY, timeout_s=20)).revision > 0


async def test_a_failed_first_contact_is_reported_in_one_line(
    closed: Endpoint, silent: Endpoint
) -> None:
    error = await failure(closed, silent, connect_timeout_s=1.0)
    assert isinstance(error, EtcdUnavailableError)
    assert "connection refused - is etcd running there?" in str(error)
    assert f"http://{silent.target}: no connection within" in str(error)
    assert "\n" not in str(error)
    assert len(error.endpoints) == 2
    assert "no connection" in error.endpoints[f"http://{silent.target}"]


async def test_a_server_that_comes_back_is_found_again(server: EtcdServer) -> None:
    async with client_of(server) as client:
        lease_id = (await client.grant(60)).lease_id
        server.kill()
        reading = asyncio.create_task(client.get(ANY, timeout_s=LIMIT_S))
        renewal = asyncio.create_task(client.keep_alive(lease_id, timeout_s=LIMIT_S))
        writing = asyncio.create_task(client.txn(create(b"after"), timeout_s=LIMIT_S))
        await in_background(server.start)
        assert (await reading).revision > 0
        assert await renewal > 0
        try:
            assert (await writing).succeeded
        except OutcomeUnknownError:  # it was sent before the loss was noticed
            await client.get(ANY)


async def test_a_write_to_a_stopped_server_has_an_unknown_outcome(server: EtcdServer) -> None:
    async with client_of(server) as client:
        await client.txn(put(b"warm"))
        server.pause()
        try:
            with pytest.raises(OutcomeUnknownError, match="may or may not"):
                await client.txn(create(b"doubt"), timeout_s=1.0)
            with pytest.raises(EtcdUnavailableError):
                await client.get(ANY, timeout_s=1.0)
        finally:
            server.resume()
        # Whether the server still did it, and when, is its own affair. It is done once.
        found = (await client.get(Get(PREFIX + b"doubt"), timeout_s=LIMIT_S)).count
        again = await client.txn(create(b"doubt"), timeout_s=LIMIT_S)
        assert not (found and again.succeeded)
        (kv,) = (await client.get(Get(PREFIX + b"doubt"), timeout_s=LIMIT_S)).kvs
        assert kv.create_revision == kv.mod_revision


@pytest.mark.slow
async def test_a_half_open_connection_is_noticed_by_pings(server: EtcdServer) -> None:
    """One endpoint, connected and silent: a long call ends when the pings stay unanswered."""
    async with client_of(server) as client:
        await client.txn(put(b"warm"))
        server.pause()
        reading = asyncio.create_task(client.get(ANY, timeout_s=LIMIT_S))
        with pytest.raises(OutcomeUnknownError):
            await client.txn(create(b"ping"), timeout_s=LIMIT_S)
        server.resume()
        assert (await reading).revision > 1


async def in_doubt(client: EtcdClient) -> EtcdUnavailableError | None:
    """Try a write that must fail; ``None`` if its outcome is unknown."""
    try:
        await client.txn(create(b"quorum"), timeout_s=3.0)
    except OutcomeUnknownError:
        return None
    except EtcdUnavailableError as error:
        return error
    raise AssertionError("a write without a quorum was applied")


async def test_a_write_without_a_quorum_is_refused_not_in_doubt(cluster: EtcdCluster) -> None:
    lonely, *others = cluster.members
    async with client_of(lonely) as client:
        for other in others:
            other.kill()
        outcome = await in_doubt(client)
        while outcome is None:  # until the member knows that it has no leader
            outcome = await in_doubt(client)
        assert "no leader" in str(outcome)


async def test_a_closed_client_refuses_calls_and_ends_those_in_flight(server: EtcdServer) -> None:
    client = EtcdClient(connection(server), InOrder())
    lease = await client.grant(60)
    await client.keep_alive(lease.lease_id)
    server.pause()
    calls = [
        asyncio.create_task(client.get(ANY)),
        asyncio.create_task(client.keep_alive(lease.lease_id)),
    ]
    write = asyncio.create_task(client.txn(put(b"x")))
    await asyncio.sleep(0.2)  # any point in their way will do
    await client.close()
    await client.close()
    for call in calls:
        with pytest.raises(EtcdUnavailableError, match="closed"):
            await call
    with pytest.raises((EtcdUnavailableError, OutcomeUnknownError), match="closed"):
        await write
    with pytest.raises(EtcdUnavailableError, match="closed"):
        await client.get(ANY)
    with pytest.raises(EtcdUnavailableError, match="closed"):
        client.watch(PREFIX, start_revision=1)
    server.resume()


async def test_a_cancelled_call_is_cancelled(server: EtcdServer) -> None:
    async with client_of(server) as client:
        lease_id = (await client.grant(60)).lease_id
        server.pause()
        calls = [
            asyncio.create_task(client.get(ANY)),
            asyncio.create_task(client.keep_alive(lease_id)),
        ]
        await asyncio.sleep(0.1)  # any point in their way will do
        for call in calls:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        server.resume()
        assert await client.keep_alive(lease_id) == 60


@pytest.mark.slow
async def test_a_grant_under_a_chosen_id_is_repeated_safely(server: EtcdServer) -> None:
    """The first attempt's reply is lost; whether it was applied or not, the grant succeeds."""
    async with client_of(server) as client:
        await client.get(ANY)
        server.pause()
        granting = asyncio.create_task(client.grant(60, lease_id=4711, timeout_s=LIMIT_S))
        revoking = asyncio.create_task(client.revoke(4712, timeout_s=LIMIT_S))
        await asyncio.wait([granting], timeout=11.5)  # the attempt limit is 10 s
        server.resume()
        lease = await granting
        assert (lease.lease_id, lease.ttl_s) == (4711, 60)
        await revoking  # a lease that never was: there is no error either
        assert await client.keep_alive(4711) == 60
