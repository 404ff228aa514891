"""Named leadership as a program uses it, on a real etcd."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest

import rdzv_etcd
from rdzv_etcd.errors import (
    ElectionTimeoutError,
    LeadershipLostError,
    MisuseError,
    StoreTimeoutError,
    WorldOverError,
)
from rdzv_etcd.schema.keys import JobKeys
from tests.library.nodes import LIMIT_S, at_once, groups, join_all, node_settings
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


@pytest.mark.every_etcd
def test_members_lead_one_after_the_other(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "3"), 3) as nodes:
        worlds = join_all(nodes)
        counted: list[tuple[tuple[int, int], bytes]] = []

        def work(world: rdzv_etcd.World) -> None:
            with world.elect("counter", LIMIT_S) as leadership:
                assert leadership.is_held
                assert leadership.name == "counter"
                assert world.leader("counter") == world.node_ids[world.rank]
                leadership.set("by", b"%d" % world.rank)
                counted.append((leadership.fence, world.store.get("by", LIMIT_S)))
            assert not leadership.is_held
            assert leadership.wait_lost(0.0)

        at_once([partial(work, world) for world in worlds])
        assert [fence for fence, _ in counted] == sorted({fence for fence, _ in counted})
        assert {value for _, value in counted} == {b"0", b"1", b"2"}
        assert worlds[0].leader("counter") is None
        (epoch,) = {fence[0] for fence, _ in counted}
        assert epoch == worlds[0].epoch


def test_who_waits_in_vain_and_who_is_told_to_stop(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        one, other = join_all(nodes)
        leadership = one.elect("writer")
        assert repr(leadership).startswith("<Leadership 'writer' fence=(")
        assert not leadership.wait_lost(0.05)
        with pytest.raises(MisuseError, match="holds the leadership 'writer'"):
            one.elect("writer")
        with pytest.raises(ElectionTimeoutError) as caught:
            other.elect("writer", 0.2)
        assert caught.value.leader == one.node_ids[one.rank] == other.leader("writer")
        etcd_server.gateway.revoke(nodes[_of(nodes, one)]._node.context.session.lease_id)
        assert leadership.wait_lost(LIMIT_S)
        with pytest.raises(LeadershipLostError, match="nothing was written") as lost:
            leadership.set("state", b"1")
        assert lost.value.fence == leadership.fence
        with pytest.raises(StoreTimeoutError):
            other.store.get("state", 0.2)
        leadership.resign()
        with other.elect("writer", LIMIT_S) as next_one:
            assert next_one.fence > leadership.fence


def _of(nodes: list[rdzv_etcd.Group], world: rdzv_etcd.World) -> int:
    return [node.node_id for node in nodes].index(world.node_ids[world.rank])


def test_waiting_ends_with_the_world_and_what_it_left_with_the_job(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        one, other = join_all(nodes)
        held = one.elect("writer")
        leaver = nodes[_of(nodes, one)]

        def wait() -> type[Exception]:
            try:
                other.elect("writer")
            except WorldOverError as error:
                return type(error)
            raise AssertionError("it came to lead")

        assert at_once([wait, partial(leaver.leave, "has to go")])[0] is WorldOverError
        assert not held.is_held
        assert held.wait_lost()
        held.resign()


def test_one_that_is_dropped_is_resigned(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        one, other = join_all(nodes)
        one.elect("writer")
        gc.collect()
        with other.elect("writer", LIMIT_S):
            pass
        place = JobKeys("/rdzv_etcd", job_id).offices.start
        assert len(etcd_server.keys(place)) == 2


def test_on_asyncio(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    async def work() -> None:
        with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
            one, other = (
                rdzv_etcd.aio.World(world) for world in await asyncio.to_thread(join_all, nodes)
            )
            async with await one.elect("writer") as leadership:
                assert leadership.is_held
                assert leadership.name in repr(leadership)
                assert await other.leader("writer") == (await one.node_ids())[one.rank]
                await leadership.set("state", b"1")
                assert not await leadership.wait_lost(0.05)
                waits = asyncio.ensure_future(other.elect("writer"))
                await asyncio.sleep(0.1)
                waits.cancel()
                await asyncio.wait({waits})
                assert waits.cancelled()
            assert await leadership.wait_lost()
            later = await one.elect("writer", LIMIT_S)
            assert later.fence > leadership.fence
            await later.resign()
            await later.resign()

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))
