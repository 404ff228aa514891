"""Keep-alives that are not answered: reported in time, and sent again over another connection."""

from __future__ import annotations

import asyncio
import gc
import time

import psutil
import pytest

from rdzv_etcd.errors import EtcdUnavailableError
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.settings import Endpoint
from tests.etcd.tools import LIMIT_S, PREFIX, client_of, in_background, put, run
from tests.support.bridge import FaultBridge
from tests.support.processes import end, free_port, spawn
from tests.support.servers import EtcdCluster, EtcdServer

pytestmark = pytest.mark.every_etcd


async def test_a_reply_that_does_not_come_is_an_error_in_time(server: EtcdServer) -> None:
    async with client_of(server) as client:
        lease = await client.grant(60)
        assert await client.keep_alive(lease.lease_id) == 60
        server.pause()
        for limit_s in (0.5, 1.5):
            with pytest.raises(EtcdUnavailableError):
                await client.keep_alive(lease.lease_id, timeout_s=limit_s)
        server.resume()
        assert await client.keep_alive(lease.lease_id, timeout_s=LIMIT_S) == 60


async def test_a_dead_connection_is_given_up_once(server: EtcdServer) -> None:
    """However many keep-alives were under way over it: the others are no news of the next one."""
    with FaultBridge(server.address) as bridge:
        async with client_of(Endpoint(bridge.host, bridge.port)) as client:
            leases = [(await client.grant(60)).lease_id for _ in range(3)]

            async def renew_later(lease_id: int, after_s: float) -> int:
                await asyncio.sleep(after_s)
                return await client.keep_alive(lease_id, timeout_s=LIMIT_S)

            before = bridge.connections
            bridge.half_open()
            late = zip(leases, (0.0, 0.3, 0.6), strict=True)
            assert await asyncio.gather(*(renew_later(*each) for each in late)) == [60, 60, 60]
            await asyncio.sleep(0.5)
            assert await client.keep_alive(leases[0]) == 60
            assert bridge.connections == before + 1


def test_a_connection_that_was_given_up_is_closed_at_once(server: EtcdServer) -> None:
    """Not when the garbage collector comes by, which in an idle process it may not for hours."""

    def connections() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr[1] == server.port for one in found)

    async def scenario() -> None:
        async with client_of(server) as client:
            watch = client.watch(b"a", start_revision=1)
            await watch.ready()
            lease = await client.grant(60)
            for _ in range(3):
                server.pause()
                with pytest.raises(EtcdUnavailableError):
                    await client.keep_alive(lease.lease_id, timeout_s=0.5)
                server.resume()
                assert await client.keep_alive(lease.lease_id, timeout_s=LIMIT_S) == 60
            deadline_s = time.monotonic() + LIMIT_S
            while connections() > 1:
                assert time.monotonic() < deadline_s, f"{connections()} connections"
                await asyncio.sleep(0.05)  # nothing announces that a socket is closed
            await watch.close()

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


async def test_another_member_takes_over_well_within_the_lease(cluster: EtcdCluster) -> None:
    leader = await in_background(cluster.leader)
    follower, *others = (member for member in cluster.members if member is not leader)
    async with client_of(follower, leader, *others) as client:
        lease = await client.grant(60)
        assert await client.keep_alive(lease.lease_id) == 60
        follower.pause()
        assert await client.keep_alive(lease.lease_id, timeout_s=10.0) == 60
        assert (await client.get(Get(PREFIX), timeout_s=LIMIT_S)).count == 0
        assert (await client.txn(put(b"after"), timeout_s=LIMIT_S)).succeeded
        follower.resume()


async def test_a_lease_is_renewed_through_the_proxy_of_etcd(server: EtcdServer) -> None:
    """It ends a stream whose requests are over, before the reply to them has come."""
    at = Endpoint(server.host, free_port())
    addresses = [f"--endpoints={server.endpoint}", f"--listen-addr={at.target}"]
    addresses += [f"--advertise-client-url={at.target}"]
    command = [str(server.binary.path), "grpc-proxy", "start", *addresses]
    proxy = spawn(command, server.log.with_name("proxy.log"))
    try:
        async with client_of(at) as client:
            lease = await client.grant(60, timeout_s=LIMIT_S)
            for _ in range(3):
                assert await client.keep_alive(lease.lease_id, timeout_s=LIMIT_S) == 60
    finally:
        await in_background(lambda: end(proxy))
