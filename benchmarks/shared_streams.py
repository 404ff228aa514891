"""Many watches on one gRPC stream, and many leases: as etcd allows it, with the same messages.

etcd sends one event per watch and one reply per renewal all the same. Knows etcd's stream
protocols; neither reconnects nor catches up: a benchmark that loses a stream has failed, unless it
is one of renewals that etcd has only no time for.

etcd holds 128 responses per stream back for a slow reader and delivers what comes on top by a
slower way, so a stream should have fewer watches than that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.errors import LAGGING, SENDING

Notify = Callable[[Any], None]
"""Told each response with events, as the message that came."""


_TICK_S = 0.05


class SharedWatch:
    """One stream. All methods run on the loop on which it was made."""

    def __init__(self, channel: Any) -> None:
        self._rpc = messages.load()
        self._stream = self._rpc.WatchStub(channel).Watch()
        self._writing = asyncio.Lock()
        self._opening: deque[tuple[asyncio.Future[tuple[int, int]], Notify]] = deque()
        self._notify: dict[int, Notify] = {}

    async def open(self, key: bytes, range_end: bytes | None, notify: Notify) -> tuple[int, int]:
        """Watch from now on; return the watch's id and the revision from which it does."""
        opened: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        async with self._writing:  # etcd confirms in the order in which it was asked
            self._opening.append((opened, notify))
            await self._stream.write(messages.watch_request(key, range_end, 0))
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


class SharedRenewals:
    """Renews each of ``leases`` once in a period, evenly spread, over one stream.

    Who is to be forgotten is taken out of ``leases``. What could not be sent in time because the
    machine is busy is not made up for.
    """

    def __init__(self, channel: Any, period_s: float, leases: Mapping[int, object]) -> None:
        self._rpc = messages.load()
        self._stub = self._rpc.LeaseStub(channel)
        self._period_s = period_s
        self._leases = leases
        self._turn: deque[int] = deque()

    async def run(self) -> None:
        """Renew until cancelled.

        Raises gRPC's error when the stream breaks, and RuntimeError when etcd ends it or does not
        know a lease. When etcd only has too much to do, the stream is opened again.
        """
        while True:
            stream = self._stub.LeaseKeepAlive()
            reading = asyncio.ensure_future(self._read(stream))
            sending = asyncio.ensure_future(self._send(stream))
            try:
                await asyncio.gather(reading, sending)
            except grpc.RpcError as error:
                told = error.details() or ""
                if LAGGING not in told and SENDING not in told:
                    raise
            finally:
                reading.cancel()
                sending.cancel()

    async def _send(self, stream: Any) -> None:
        clock = asyncio.get_running_loop().time
        last_s, owed = clock(), 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = clock()
            owed += min(now_s - last_s, self._period_s) / self._period_s * len(self._leases)
            last_s = now_s
            while owed >= 1 and self._leases:
                if not self._turn:
                    self._turn.extend(self._leases)
                lease = self._turn.popleft()
                if lease not in self._leases:
                    continue
                try:
                    await stream.write(self._rpc.LeaseKeepAliveRequest(ID=lease))
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the stream has ended; why, its reader learns
                owed -= 1

    async def _read(self, stream: Any) -> None:
        while True:
            reply = await stream.read()
            if not reply:
                raise RuntimeError("etcd ended the keep-alive stream")
            if reply.TTL <= 0 and reply.ID in self._leases:
                raise RuntimeError(f"etcd does not know the lease {reply.ID:x}")
