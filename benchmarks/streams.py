"""Watches and renewals of simulated nodes on plain gRPC streams, with the library's own messages.

Knows etcd's stream protocols; neither resumes nor catches up: a benchmark that loses a watch has
failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc

from rdzv_etcd.etcd import messages

_BATCHES = 50
"""In which the leases are renewed, evenly spread over a period."""


async def watch(
    channel: Any, key: bytes, range_end: bytes | None, notify: Callable[[Any], None]
) -> asyncio.Task[None]:
    """Watch from now on; ``notify`` gets each response with events.

    The task that is returned reads until it is cancelled; it fails when etcd ends the stream.
    """
    stream = messages.load().WatchStub(channel).Watch()
    await stream.write(messages.watch_request(key, range_end, 0))
    if not (await stream.read()).created:
        raise RuntimeError("etcd confirmed no watch")

    async def read() -> None:
        try:
            while response := await stream.read():
                if response.events:
                    notify(response)
            raise RuntimeError("etcd ended a watch stream")
        finally:
            stream.cancel()

    return asyncio.ensure_future(read())


async def renew(channel: Any, period_s: float, leases: Mapping[int, object]) -> None:
    """Renew each of ``leases`` about once in a period, over one stream, until cancelled.

    A stream that breaks because etcd has too much to do is opened again. Raises RuntimeError if
    etcd does not know a lease.
    """
    rpc = messages.load()
    while True:
        stream = rpc.LeaseStub(channel).LeaseKeepAlive()
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            for number in range(_BATCHES):
                due = [lease for lease in leases if lease % _BATCHES == number]
                for lease in due:
                    await stream.write(rpc.LeaseKeepAliveRequest(ID=lease))
                for _ in due:
                    reply = await stream.read()
                    if reply.TTL <= 0 and reply.ID in leases:
                        raise RuntimeError(f"etcd does not know the lease {reply.ID:x}")
                await asyncio.sleep(period_s / _BATCHES)
        stream.cancel()
