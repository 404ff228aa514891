"""The same as :mod:`tests.typed.blocking` for the names on asyncio."""

from __future__ import annotations

import asyncio
import sys

from typing_extensions import assert_type

import rdzv_etcd
from rdzv_etcd import aio
from tests.typed.blocking import why


async def main(endpoints: str, job: str) -> None:
    async with await aio.connect(
        [endpoints], job=job, nodes=(1, 1), data={"gpus": 8}, local_addr="127.0.0.1", lease_ttl=5
    ) as group:
        assert_type(group, aio.Group)
        assert_type(group.job, str)
        assert_type(group.node_id, str)
        assert_type(group.waiting_count(), int)
        assert_type(group.closure(), rdzv_etcd.Closure | None)
        assert_type(group.has_left, bool)
        group.when_left(lambda: None)
        assert_type(group.drain_reason, str | None)
        async with group.events() as events:
            assert_type(events, aio.JobEvents)
            assert isinstance(await events.next(timeout_s=60), rdzv_etcd.Snapshot)
        async for world in group.worlds():
            await in_world(world)
            await observed(endpoints, job)
            assert_type(await group.finish("done"), bool)
        await group.leave("done")


async def in_world(world: aio.World) -> None:
    assert_type((world.rank, world.size, world.epoch, world.round), tuple[int, int, int, int])
    assert_type(world.master, rdzv_etcd.Master)
    assert_type(await world.node_ids(), tuple[str, ...])
    assert_type(await world.members(), tuple[rdzv_etcd.WorldMember, ...])
    listener = world.take_listener()
    assert_type(listener, rdzv_etcd.Listener | None)
    if listener is not None:
        listener.close()
    assert_type(await world.exchange(b"mine", timeout_s=60), list[bytes])
    await world.barrier("loaded", timeout_s=60)
    await in_store(world.store)
    assert_type((world.over, world.should_yield), tuple[bool, bool])
    world.alive()
    assert_type(await world.wait_over(0.0), bool)
    assert_type(why(world.change), str)


async def observed(endpoints: str, job: str) -> None:
    async with await aio.observe(endpoints, job=job) as observer:
        assert_type(observer, aio.Observer)
        assert_type(await observer.state(), rdzv_etcd.JobState)
        async for event in observer.events():
            assert_type(event, "rdzv_etcd.JobEvent")
            break


async def watched(group: aio.Group, world: aio.World) -> None:
    """For supervisors."""
    members = await world.members()
    assert_type(await group.report_dead(members[0], "no power", certain=True), bool)
    group.drain("maintenance")


async def in_store(store: aio.RoundStore) -> None:
    await store.set("one", b"1")
    await store.multi_set({"two": b"2", "three": b"3"})
    assert_type(await store.get("one", timeout_s=60, even_if_over=True), bytes)
    assert_type(await store.multi_get(["two", "three"]), list[bytes])
    await store.wait(["one"])
    assert_type(await store.check(["one"]), bool)
    assert_type(await store.add("number", 2), int)
    await store.append("one", b"1")
    assert_type(await store.compare_set("one", b"11", b"1"), bytes)
    assert_type(await store.delete("one"), bool)
    assert_type(await store.num_keys(), int)
    assert_type(await store.list_keys(), list[str])


async def refused(group: aio.Group, world: aio.World) -> None:
    """Mistakes that a type checker has to find."""
    await aio.connect("etcd:2379", job="job", nodes=2, lease_ttl="5")  # type: ignore[arg-type]
    await world.exchange("text")  # type: ignore[arg-type] # bytes
    len(world.members())  # type: ignore[arg-type] # to be awaited
    await group.fail()  # type: ignore[call-arg] # why?
    await group.fail("it is broken", force=True)
    joined = aio.Group(rdzv_etcd.connect("etcd:2379", job="job", nodes=2)).join(
        timeout_s=60, because="it failed"
    )
    assert_type(await joined, aio.World)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
