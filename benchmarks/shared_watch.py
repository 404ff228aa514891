"""Many watches on one gRPC stream, as etcd allows it: one event per watch all the same.

Knows etcd's watch protocol; neither reconnects nor catches up: a benchmark that loses a stream has
failed. etcd holds 128 responses per stream back for a slow reader and delivers what comes on top by
a slower way, so a stream should have fewer watches than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.codec import Codec

Notify = Callable[[Any], None]
"""Told each response with events, as the message that came."""


class SharedWatch:
    """One stream. All methods run on the loop on which it was made."""

    def __init__(self, channel: Any) -> None:
        self._rpc = stubs.load()
        self._codec = Codec()
        self._stream = self._rpc.WatchStub(channel).Watch()
        self._writing = asyncio.Lock()
        self._opening: deque[tuple[asyncio.Future[tuple[int, int]], Notify]] = deque()
        self._notify: dict[int, Notify] = {}

    async def open(self, key: bytes, range_end: bytes | None, notify: Notify) -> tuple[int, int]:
        """Watch from now on; return the watch's id and the revision from which it does."""
        opened: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        async with self._writing:  # etcd confirms in the order in which it was asked
            self._opening.append((opened, notify))
            await self._stream.write(self._codec.watch(key, range_end, 0))
        return await opened

    async def cancel(self, watch_id: int) -> None:
        """Hear no more of a watch."""
        self._notify[watch_id] = _nobody
        cancel = self._rpc.WatchCancelRequest(watch_id=watch_id)
        async with self._writing:
            await self._stream.write(self._rpc.WatchRequest(cancel_request=cancel))

    async def run(self) -> None:
        """Read until cancelled. Raises RuntimeError when etcd ends the stream."""
        read, notify = self._stream.read, self._notify
        while True:
            response = await read()
            if not response:
                raise RuntimeError("etcd ended a watch stream")
            if response.created:
                opened, wants = self._opening.popleft()
                notify[response.watch_id] = wants
                opened.set_result((response.watch_id, response.header.revision))
            elif response.events:
                notify[response.watch_id](response)


def _nobody(_response: Any) -> None:
    """Hears the last events of a watch that is being cancelled."""
