"""A client that was driven away from its endpoint comes back, without an interruption."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.etcd.watch import EtcdWatch
from rdzv_etcd.settings.connection import Endpoint
from tests.etcd.test_watch import names
from tests.etcd.tools import (
    END,
    LIMIT_S,
    PREFIX,
    client_of,
    connection,
    create,
    in_background,
    put,
)
from tests.library.nodes import wait_until
from tests.support.servers import EtcdCluster, EtcdServer

SOON_S = 0.5
CLIENTS = 9


def streams(server: EtcdServer) -> float:
    """How many clients have their watches at this member."""
    return server.metrics().total("etcd_debugging_mvcc_watch_stream_total")


@pytest.mark.slow
async def test_after_a_rolling_upgrade_every_client_is_where_it_was(cluster: EtcdCluster) -> None:
    members = cluster.members
    async with AsyncExitStack() as stack:
        clients = [
            EtcdClient(connection(*members), SystemClock(seed), failback_after_s=SOON_S)
            for seed in range(CLIENTS)
        ]
        for client in clients:
            stack.push_async_callback(client.close)
        watches: list[EtcdWatch] = []
        for client in clients:
            watches.append(client.watch(PREFIX, END, start_revision=0))
            await watches[-1].ready()
        leases = [(await client.grant(60)).lease_id for client in clients]
        before = [streams(member) for member in members]
        assert sum(before) == CLIENTS
        assert all(before)  # the first endpoint is drawn
        for n, member in enumerate(members):
            await in_background(member.stop)
            name = b"during %d" % n
            await clients[0].txn(create(name), repeatable=True, timeout_s=LIMIT_S)
            for client, watch, lease_id in zip(clients, watches, leases, strict=True):
                assert (await names(watch, 1))[0] == name
                assert await client.keep_alive(lease_id, timeout_s=LIMIT_S) > 0
            await in_background(member.start)
        await in_background(
            lambda: wait_until("home", lambda: [streams(m) for m in members] == before)
        )
        await clients[0].txn(put(b"after"), repeatable=True)
        for client, watch, lease_id in zip(clients, watches, leases, strict=True):
            assert await names(watch, 1) == [b"after"]
            assert await client.keep_alive(lease_id) > 0


@pytest.fixture
def silent_home() -> Iterator[tuple[int, threading.Semaphore]]:
    """A port that accepts connections and answers nothing; the semaphore counts them."""
    came = threading.Semaphore(0)
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                taken.append(listener.accept()[0])
            except OSError:
                return
            came.release()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1], came
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for one in taken:
        one.close()


async def test_no_client_returns_to_an_endpoint_that_does_not_answer(
    server: EtcdServer, silent_home: tuple[int, threading.Semaphore]
) -> None:
    port, came = silent_home
    async with client_of(Endpoint("127.0.0.1", port), server, failback_after_s=0.1) as client:
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        lease = await client.grant(60)
        for n in range(2):
            await in_background(lambda: came.acquire(timeout=LIMIT_S))
            await client.txn(put(b"%d" % n))
            assert await names(watch, 1) == [b"%d" % n]
            assert await client.keep_alive(lease.lease_id) > 0
        assert server.metrics().requests()["Watch"] == 1


async def test_calls_under_way_survive_the_way_home(cluster: EtcdCluster) -> None:
    first, second, _ = cluster.members
    async with client_of(second, first, near=1, failback_after_s=SOON_S) as client:
        await in_background(first.stop)
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        await in_background(first.start)
        back = asyncio.create_task(
            in_background(lambda: wait_until("home", lambda: streams(first) == 1))
        )
        count = 0
        while not back.done():  # guarded writes: an interruption would leave them in doubt
            await asyncio.gather(*(client.txn(put(b"%d" % n)) for n in range(count, count + 20)))
            count += 20
        await back
        assert len(set(await names(watch, count))) == count
        assert (await client.get(Get(PREFIX, END))).count == count
