"""Somebody else's synchronous gRPC channel as an endpoint: that of an ``etcd3.Etcd3Client``.

Knows the synchronous gRPC API and how its callbacks reach an event loop. Must not close what it
was lent, nor know what the calls mean.

Unary calls are futures whose callback wakes the loop. A stream needs the threads that synchronous
gRPC wants (one that reads, one that gRPC starts to take requests); both end with the stream.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from rdzv_etcd.etcd.channels import Metadata, bind
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.server import ClosedError, LenderClosedError, Stream

_CLOSED_BY_OWNER = (
    "the etcd3 client that was lent to this one has been closed: keep it open until all that use "
    "it have left"
)


class BorrowedServer:
    """Implements :class:`rdzv_etcd.etcd.server.Server` over a synchronous channel."""

    def __init__(self, name: str, channel: grpc.Channel) -> None:
        self.name = name
        self._calls = bind(channel)
        self._open: set[Any] = set()
        self._closed = False

    async def ready(self, limit_s: float) -> bool:  # noqa: ARG002 - part of the protocol
        """Return at once: without a thread a synchronous channel cannot be waited for."""
        self._require_open()
        return True

    async def unary(
        self, method: str, request: Any, *, timeout_s: float, metadata: Metadata
    ) -> Any:
        self._require_open()
        call = _begun(
            partial(self._calls[method].future, request, timeout=timeout_s, metadata=metadata)
        )
        done = asyncio.get_running_loop().create_future()
        call.add_done_callback(_wake(done))
        self._open.add(call)
        try:
            await done
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            self._open.discard(call)
        if call.cancelled():
            raise ClosedError("the client was closed" if self._closed else _CLOSED_BY_OWNER)
        error = call.exception()
        if error is not None:
            raise error
        return call.result()

    def stream(self, method: str, *, metadata: Metadata) -> Stream:
        self._require_open()
        stream = _ThreadedStream(self._calls[method], metadata, self._open.discard)
        self._open.add(stream)
        return stream

    async def renew(self) -> None:
        """Do nothing: the connection is the lender's."""

    async def close(self) -> None:
        """End the calls; the channel stays open, it is the lender's."""
        self._closed = True
        for call in tuple(self._open):
            call.cancel()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")


class _ThreadedStream:
    """A bidirectional call with a thread that reads; the loop gets what it reads."""

    def __init__(
        self, method: Any, metadata: Metadata, forget: Callable[[_ThreadedStream], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._forget = forget
        self._ended = False
        self._call = _begun(partial(method, iter(self._requests.get, None), metadata=metadata))
        threading.Thread(
            target=self._read_all, name="rdzv-etcd borrowed stream", daemon=True
        ).start()

    def send(self, message: Any) -> None:
        self._requests.put(message)

    async def read(self) -> Any:
        reply = await self._replies.get()
        if isinstance(reply, BaseException):
            self._replies.put_nowait(reply)  # every later read fails as well
            raise reply
        return reply

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._call.cancel()
            self._requests.put(None)  # ends the thread that takes requests
            self._forget(self)
            self._replies.put_nowait(ClosedError("the stream was cancelled"))

    def _read_all(self) -> None:
        try:
            for reply in self._call:
                self._hand_over(reply)
            self._hand_over(None)
        except grpc.RpcError as error:
            self._hand_over(error)

    def _hand_over(self, reply: Any) -> None:
        _call_in(self._loop, lambda: self._replies.put_nowait(reply))


def _begun(begin: Callable[[], Any]) -> Any:
    """Begin a call. Raises LenderClosedError."""
    try:
        return begin()
    except ValueError as error:  # all that gRPC says of a channel that was closed
        raise LenderClosedError(f"{_CLOSED_BY_OWNER} ({error})") from None


def _wake(waiter: asyncio.Future[None]) -> Callable[[Any], None]:
    loop = waiter.get_loop()

    def set_result() -> None:
        if not waiter.done():
            waiter.set_result(None)

    return lambda _call: _call_in(loop, set_result)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The loop was closed meanwhile, so nobody waits any more. Anything else is a defect.
        if not loop.is_closed():
            raise
