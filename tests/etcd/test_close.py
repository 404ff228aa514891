"""After close nothing is left: no thread, no socket, no task."""

from __future__ import annotations

import asyncio

from rdzv_etcd.etcd.client import EtcdClient
from tests.etcd.tools import PREFIX, client_of, in_background, put, run, soon
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


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


def test_a_client_closed_during_an_outage_leaves_nothing(server: EtcdServer) -> None:
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
