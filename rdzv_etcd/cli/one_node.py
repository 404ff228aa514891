"""What commands about one node share: which one is meant, and news of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdzv_etcd.cli.output import RefusedError
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.api import Etcd, Event, Watch
from rdzv_etcd.node.pages import read_pages
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.names import display_name


async def find(etcd: Etcd, keys: JobKeys, node: str) -> str:
    """Return the id of the one node that this names. Raises RefusedError, EtcdError."""
    there = [
        keys.node_id(kv.key) for kv in (await read_pages(etcd, keys.nodes, keys_only=True)).kvs
    ]
    named = [each for each in there if each == node or display_name(each) == node]
    named = named or [each for each in there if each.startswith(f"{node}~")]
    if len(named) == 1:
        return named[0]
    if named:
        raise RefusedError(f"{node!r} names {len(named)} nodes: {', '.join(sorted(named)[:8])}")
    hint = f"there are {', '.join(sorted(there)[:8])}" if there else "no node is there"
    raise RefusedError(f"no node {node!r} in job {keys.job_id!r} under {keys.prefix}: {hint}")


class News:
    """Tells when a node's place, or what all nodes watch, has changed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """What has happened, the oldest first, until :meth:`clear`."""
        self._is_there = asyncio.Event()
        self._failure: EtcdError | None = None

    def clear(self) -> None:
        self.events.clear()
        self._is_there.clear()

    async def more(self, until_s: float) -> bool:
        """Wait for news since :meth:`clear`; ``False``: there were none by then.

        Raises EtcdError if there will be none, because etcd ended a watch.
        """
        clock = SystemClock()
        try:
            await clock.wait_for(self._is_there.wait(), until_s - clock.now_s())
        except TimeoutError:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    async def follow(self, watch: Watch) -> None:
        """Take what a watch brings until it is closed."""
        try:
            async for batch in watch:
                if batch.events:
                    self.events += batch.events
                    self._is_there.set()
        except EtcdError as error:
            self._failure = error
            self._is_there.set()


@asynccontextmanager
async def watching(etcd: Etcd, keys: JobKeys, node_id: str) -> AsyncIterator[News]:
    """News of a node from now on. Raises EtcdError."""
    news = News()
    watches = [
        etcd.watch(keys.node(node_id), start_revision=0),
        etcd.watch(keys.control.start, keys.control.end, start_revision=0),
    ]
    tasks: list[asyncio.Task[None]] = []
    try:
        for watch in watches:
            await watch.ready()
        tasks += [asyncio.create_task(news.follow(watch)) for watch in watches]
        yield news
    finally:
        for watch in watches:
            await watch.close()
        await asyncio.gather(*tasks, return_exceptions=True)
