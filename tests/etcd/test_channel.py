"""One endpoint: whatever is asked of it while its channel is given up or closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.etcd.channel import ClosedError, Server
from rdzv_etcd.etcd.messages import load
from rdzv_etcd.settings.connection import Endpoint

TURNS = 12
"""Of the loop, after which everything waits for the server."""

Asked = Callable[[Server], Awaitable[Any]]


async def ready(server: Server) -> bool:
    return await server.ready(0.2)


async def unary(server: Server) -> object:
    request = load().RangeRequest(key=b"k")
    return await server.unary("Range", request, timeout_s=0.2, metadata=())


async def read(server: Server) -> object:
    return await server.stream("Watch", load().WatchRequest(), metadata=()).read()


@pytest.mark.parametrize("asked", [ready, unary, read])
@pytest.mark.parametrize("turns", range(TURNS))
async def test_whenever_a_channel_is_given_up_only_known_errors_come_out(
    silent: Endpoint, asked: Asked, turns: int
) -> None:
    """Others would end the watch or the call, for which this is one endpoint among several. The
    server sends nothing, so that nothing is decided."""

    async def outcome(ended: Callable[[Server], Awaitable[None]]) -> object:
        server = Server(silent.target, silent.target, None, SystemClock())
        task = asyncio.ensure_future(asked(server))
        for _ in range(turns):
            await asyncio.sleep(0)
        await ended(server)
        answers = await asyncio.gather(task, return_exceptions=True)
        await server.close()
        return answers[0]

    renewed = await outcome(Server.renew)
    closed = await outcome(Server.close)
    assert isinstance(closed, ClosedError)
    if asked is ready:
        assert renewed is False  # it has waited for the next channel
    else:
        assert isinstance(renewed, (ClosedError, grpc.aio.AioRpcError))
