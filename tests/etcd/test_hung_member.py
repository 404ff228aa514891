"""A client whose member of etcd hangs continues at another one: calls, watches, keep-alives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.etcd import retry
from rdzv_etcd.etcd.channel import LeaderChangedError, Server
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.etcd.retry import Failover
from rdzv_etcd.settings.connection import Credentials
from tests.etcd.test_watch import names
from tests.etcd.tools import END, PREFIX, client_of, in_background, put
from tests.library.nodes import wait_until
from tests.support.hung_disk import REAL_FSYNC, connected_to, hung_disk
from tests.support.servers import USER, USER_PASSWORD, EtcdCluster, EtcdServer


@pytest.fixture
def members(fresh_cluster: Callable[..., EtcdCluster]) -> list[EtcdServer]:
    """Three members; the last one leads."""
    cluster = fresh_cluster(3, flags=REAL_FSYNC)
    leader = cluster.leader()
    return [*(member for member in cluster.members if member is not leader), leader]


@pytest.mark.parametrize("calls", [False, True], ids=["it only watches", "it calls"])
@pytest.mark.every_etcd
async def test_a_client_leaves_a_member_whose_disk_hangs_as_a_whole(
    members: list[EtcdServer], *, calls: bool
) -> None:
    """It finds that out by itself, or by a call that is not answered."""
    home, _, etcd_leader = members
    async with client_of(*members) as client, client_of(etcd_leader) as other:
        client.watch_health.check_every(3600.0 if calls else 3.0)
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        lease = await client.grant(60)
        assert await client.keep_alive(lease.lease_id) == 60
        with hung_disk(home):
            await other.txn(put(b"first"))
            if calls:
                assert (await client.get(Get(PREFIX, END))).count == 1
            assert await names(watch, 1) == [b"first"]
            await other.txn(put(b"second"))
            assert await names(watch, 1) == [b"second"]
            assert await client.keep_alive(lease.lease_id) == 60
            await in_background(
                lambda: wait_until(
                    "it has left that member", lambda: not connected_to(os.getpid(), [home])
                )
            )


@pytest.mark.parametrize("case", ["others write", "it is quiet", "its user has a role"])
@pytest.mark.every_etcd
async def test_what_a_lost_leader_of_etcd_was_asked_the_next_one_is_asked(
    members: list[EtcdServer], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """As soon as an answer shows that there is another one: etcd itself says it after 7 s. A node
    that has no other answer to come asks for one."""
    home, other, etcd_leader = members
    user: dict[str, Any] = {}
    if case == "its user has a role":
        await in_background(home.enable_auth)
        user = {"credentials": Credentials(USER, USER_PASSWORD), "readable": PREFIX}
    failures: list[BaseException] = []
    failed = Failover.failed

    def noted(self: Failover, server: Server, error: BaseException, *rest: Any, **more: Any) -> Any:
        failures.append(error)
        return failed(self, server, error, *rest, **more)

    patient = replace(retry.REPEATABLE_WRITE, shared_limit_s=60.0)
    monkeypatch.setattr(retry, "REPEATABLE_WRITE", patient)
    async with client_of(home, other, **user) as client, client_of(other, **user) as another:
        client.watch_health.check_every(3600.0)
        watch = client.watch(PREFIX, END, start_revision=0)
        await watch.ready()
        await client.txn(put(b"before"))
        monkeypatch.setattr(Failover, "failed", noted)
        etcd_leader.pause()
        try:
            writing = asyncio.ensure_future(client.txn(put(b"lost"), repeatable=True))
            await another.get(Get(PREFIX, END))  # the next leader answers
            if case == "others write":
                await another.txn(put(b"after"), repeatable=True)
            assert (await writing).succeeded
        finally:
            etcd_leader.resume()
    assert any(isinstance(error, LeaderChangedError) for error in failures)
    assert not [error for error in failures if "request timed out" in str(error)]
