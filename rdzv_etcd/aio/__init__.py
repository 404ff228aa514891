"""The library for programs on asyncio: the same names as in :mod:`rdzv_etcd`, to be awaited.

::

    async with await rdzv_etcd.aio.connect("etcd-host:2379", job="my-job", nodes=2) as group:
        async for world in group.worlds():
            print(world.rank, await world.exchange(b"10.0.0.7:9000"))

Everything runs on the library's own event loop, in its own thread; nothing here blocks the
caller's, and what waits long occupies no further thread. A call that is cancelled ends what it has
begun within some two seconds. What each method does and raises is what it does and raises there.
"""

from __future__ import annotations

from rdzv_etcd.aio.connect import connect, observe
from rdzv_etcd.aio.group import Group
from rdzv_etcd.aio.observer import JobEvents, Observer
from rdzv_etcd.aio.world import RoundStore, World

__all__ = [
    "Group",
    "JobEvents",
    "Observer",
    "RoundStore",
    "World",
    "connect",
    "observe",
]
