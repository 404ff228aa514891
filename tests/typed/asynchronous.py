"""What differs from :mod:`tests.typed.blocking` in a program on asyncio: which calls are awaited.

Both faces have the same names and parameters (tests/packaging/test_public_names.py).
"""

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
        assert_type((group.job, group.waiting_count(), group.has_left), tuple[str, int, bool])
        async with group.events() as events:
            assert_type(events, aio.JobEvents)
            assert isinstance(await events.next(timeout_s=60), rdzv_etcd.Snapshot)
        async for world in group.worlds():
            await in_world(world)
            await observed(endpoints, job)
            assert_type(await group.finish("done"), bool)
        await group.leave("done")


async def in_world(world: aio.World) -> None:
    assert_type((world.rank, world.master, world.over), tuple[int, rdzv_etcd.Master, bool])
    assert_type(await world.node_ids(), tuple[str, ...])
    assert_type(await world.members(), tuple[rdzv_etcd.WorldMember, ...])
    assert_type(await world.exchange(b"mine", timeout_s=60), list[bytes])
    await world.barrier("loaded", timeout_s=60)
    assert_type(world.store, aio.RoundStore)
    await world.store.set("one", b"1")
    assert_type(await world.store.get("one", timeout_s=60, even_if_over=True), bytes)
    assert_type(await world.wait_over(0.0), bool)
    assert_type(why(world.change), str)


async def observed(endpoints: str, job: str) -> None:
    async with await aio.observe(endpoints, job=job) as observer:
        assert_type(observer, aio.Observer)
        assert_type(await observer.state(), rdzv_etcd.JobState)
        async for event in observer.events():
            assert_type(event, "rdzv_etcd.JobEvent")
            break


async def refused(group: aio.Group, world: aio.World) -> None:
    """Mistakes that a type checker has to find."""
    await aio.connect("etcd:2379", job="job", nodes=2, lease_ttl="5")  # type: ignore[arg-type]
    await world.exchange("text")  # type: ignore[arg-type] # bytes
    len(world.members())  # type: ignore[arg-type] # to be awaited
    await group.fail()  # type: ignore[call-arg] # why?
    joined = aio.Group(rdzv_etcd.connect("etcd:2379", job="job", nodes=2)).join(
        timeout_s=60, because="it failed"
    )
    assert_type(await joined, aio.World)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
