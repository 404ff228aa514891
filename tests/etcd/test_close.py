"""After close nothing is left: no thread, no socket, no task."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdAuthError, EtcdUnavailableError
from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.api import Get
from rdzv_etcd.etcd.client import EtcdClient
from tests.etcd.tools import PREFIX, client_of, in_background, put, run, soon
from tests.support.leaks import LeakCheck
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


async def use(client: EtcdClient) -> None:
    """Use every kind of call and stream."""
    await client.connect()
    lease = await client.grant(60)
    watches = [client.watch(PREFIX + b"use", start_revision=lease.revision + 1) for _ in range(3)]
    await client.txn(put(b"use", b"1", lease.lease_id))
    for watch in watches:
        assert (await soon(watch.__anext__())).events
    assert await client.keep_alive(lease.lease_id) == 60
    await client.revoke(lease.lease_id)


def test_a_closed_client_leaves_nothing(etcd_server: EtcdServer) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            await use(client)

    run(scenario())  # what gRPC starts once per process is there now
    check = LeakCheck()
    for _ in range(3):
        run(scenario())
    check.check()


def test_a_client_closed_during_an_outage_leaves_nothing(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    server = fresh_etcd()

    async def scenario() -> None:
        async with client_of(server) as client:
            await use(client)
            watch = client.watch(PREFIX, start_revision=1)
            server.pause()
            waiting = asyncio.ensure_future(watch.__anext__())
            await asyncio.sleep(0.1)  # any point of its life will do
        await asyncio.wait([waiting])
        server.resume()
        async with client_of(server) as client:
            await use(client)
            await in_background(server.kill)
            client.watch(PREFIX, start_revision=1)
        await in_background(server.start)

    # The test's own helpers start threads that stay with their loop's executor until run() ends.
    run(scenario())
    check = LeakCheck()
    run(scenario())
    check.check()


def lender(server: EtcdServer) -> Any:
    stubs.load()
    return importlib.import_module("etcd3").client(host=server.host, port=server.port)


def test_a_lent_client_works_and_stays_open(etcd_server: EtcdServer) -> None:
    async def scenario(mine: Any) -> None:
        client = EtcdClient.from_etcd3(mine)
        await use(client)
        watch = client.watch(PREFIX, start_revision=1)
        step = asyncio.ensure_future(watch.__anext__())
        await asyncio.sleep(0.05)  # any point of its life will do
        await client.close()
        await asyncio.wait([step])

    mine = lender(etcd_server)
    run(scenario(mine))
    check = LeakCheck()
    run(scenario(mine))
    mine.put("/rdzv_etcd/t/lent", "1")
    check.check()
    mine.close()


def test_a_lent_client_that_its_owner_closes(etcd_server: EtcdServer) -> None:
    """What was under way and what comes later ends with an error of this library, at once."""

    async def scenario() -> None:
        mine = lender(etcd_server)
        client = EtcdClient.from_etcd3(mine)
        lease = await client.grant(60)
        assert await client.keep_alive(lease.lease_id) == 60
        watch = client.watch(PREFIX, start_revision=lease.revision + 1)
        await watch.ready()
        step = asyncio.ensure_future(watch.__anext__())
        mine.close()
        for work in (
            client.get(Get(PREFIX)),
            client.txn(put(b"lent")),
            client.keep_alive(lease.lease_id),
            client.revoke(lease.lease_id),
            step,
        ):
            with pytest.raises(EtcdUnavailableError, match="lent to this one has been closed"):
                await soon(work)
        await client.close()

    run(scenario())


def test_a_lent_clients_streams_survive_a_restart(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd()
    mine = lender(server)

    async def scenario() -> None:
        client = EtcdClient.from_etcd3(mine)
        lease = await client.grant(60)
        watch = client.watch(PREFIX + b"lent", start_revision=lease.revision + 1)
        assert await client.keep_alive(lease.lease_id) == 60
        await in_background(server.restart)
        assert await client.keep_alive(lease.lease_id) > 0
        await client.txn(put(b"lent"), repeatable=True)
        assert (await soon(watch.__anext__())).events
        await client.close()

    run(scenario())
    mine.close()


def test_a_lent_clients_token_is_used_until_it_expires(auth_etcd: EtcdServer) -> None:
    stubs.load()
    mine = importlib.import_module("etcd3").client(
        host=auth_etcd.host, port=auth_etcd.port, user=USER, password=USER_PASSWORD, timeout=20
    )

    async def scenario() -> None:
        client = EtcdClient.from_etcd3(mine)
        assert (await client.txn(put(b"lent"))).succeeded
        await asyncio.sleep(3.5)  # the server's tokens live two seconds
        with pytest.raises(EtcdAuthError, match="expired and cannot be renewed"):
            await client.txn(put(b"lent"))
        await client.close()

    run(scenario())
    mine.close()
