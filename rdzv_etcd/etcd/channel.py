"""One etcd member: its gRPC channel, and calls on it.

Knows with which options channels are made, and their calls. Must not know retries, failover, tokens
or what the calls mean. Failures come out as ``grpc.RpcError``; :mod:`rdzv_etcd.etcd.errors` judges
them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol
from weakref import WeakSet

from rdzv_etcd.clock import Clock
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.process import note_use


class Credentials(Protocol):
    """Those for the next connection; the same object as before unless there are others."""

    @property
    def current(self) -> grpc.ChannelCredentials: ...

    async def latest(self) -> grpc.ChannelCredentials:
        """Look whether there are others, and return the current ones then; takes a moment."""


Metadata = tuple[tuple[str, str], ...]

_OPTIONS: tuple[tuple[str, int], ...] = (
    # etcd answers pings more frequent than --grpc-keepalive-min-time (5 s) with GOAWAY, and allows
    # none on a connection without calls.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Later gRPC times a ping by this instead of the line above, and its default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Without these two, gRPC stops pinging a quiet stream after two pings.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_time_between_pings_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name: one connection attempt's limit
    # Each client has its own connections, so that closing it closes them.
    ("grpc.use_local_subchannel_pool", 1),
    # etcd is infrastructure of the cluster; a proxy for the outside world is not the way to it.
    ("grpc.enable_http_proxy", 0),
    # The limit that counts is the server's; a reply must never be too large to be read.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


def _open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Return a channel, encrypted if there are credentials."""
    note_use()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)


def _bind(channel: Any) -> dict[str, Any]:
    """Return the calls that this package uses, by name."""
    rpc = messages.load()
    kv, lease = rpc.KVStub(channel), rpc.LeaseStub(channel)
    return {
        "Range": kv.Range,
        "Txn": kv.Txn,
        "LeaseGrant": lease.LeaseGrant,
        "LeaseRevoke": lease.LeaseRevoke,
        "LeaseTimeToLive": lease.LeaseTimeToLive,
        "LeaseKeepAlive": lease.LeaseKeepAlive,
        "Watch": rpc.WatchStub(channel).Watch,
        "Authenticate": rpc.AuthStub(channel).Authenticate,
    }


class ClosedError(Exception):
    """The channel was closed under a call. Never leaves this package."""


class LeaderChangedError(Exception):
    """etcd has another leader than when the call was made. Never leaves this package."""


_UNDECIDED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


class Stream:
    """One call with one request and many responses, which has one reader at a time."""

    def __init__(
        self, server: Server, method: Any, request: Any, channel: grpc.aio.Channel, token: Metadata
    ) -> None:
        self.server = server
        self.channel = channel
        self.metadata = token
        self._over = asyncio.Event()
        self._call = method(_until(self._over, request), metadata=token)
        self._dropped = False

    async def read(self) -> Any:
        """Return the next message, ``None`` when the server ended the stream without an error."""
        if self._call is None:
            raise ClosedError("the connection was given up")
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise error.with_traceback(None) from None  # see ended()
        except asyncio.CancelledError as error:
            if self._dropped and not _being_cancelled():
                error.__traceback__ = None  # see ended()
                raise ClosedError("the connection was given up") from None
            raise
        return message if message else None  # only grpc.aio.EOF is falsy

    def cancel(self) -> None:
        """End the call at once; a pending read fails. Idempotent, does not block."""
        self._over.set()
        if self._call is not None:
            self._call.cancel()

    def drop(self) -> None:
        """Cancel because the channel is closing: the reader gets :class:`ClosedError`."""
        self._dropped = True
        self.cancel()

    async def ended(self) -> None:
        """Wait until gRPC is done with a dropped call, so that no task remains.

        Then forget it: a call keeps its connection, closed or not, and may itself be kept by the
        traceback of an error, here and in gRPC, until the garbage collector runs.
        """
        if self._call is not None:
            await self._call.code()
            self._call = None


async def _until(over: asyncio.Event, request: Any) -> AsyncIterator[Any]:
    """Yield the one request of a stream, and then nothing until the stream is over."""
    yield request
    # Otherwise gRPC would close this direction, at which a proxy (etcd's own is one) ends the
    # stream; and it would format the traceback of a cancellation.
    with contextlib.suppress(asyncio.CancelledError):
        await over.wait()


async def _only_reply(call: Any, over: asyncio.Event) -> Any:
    """Return the reply on a stream for one request, once the stream has ended."""
    try:
        reply = await call.read()
        over.set()
        await call.code()
    finally:
        over.set()
        call.cancel()  # in case that the caller was
    if not reply:
        raise ClosedError("etcd ended the stream without a reply")
    return reply


class Server:
    """One endpoint; its channel is made on first use, in the running loop, and bound to that."""

    def __init__(
        self,
        name: str,
        target: str,
        credentials: Credentials | None,
        clock: Clock,
        *,
        is_near: bool = False,
    ) -> None:
        """``credentials``: ``None`` for a plain connection. ``is_near``: it is known to be on this
        machine."""
        self.name = name
        self.is_near = is_near
        self._target = target
        self._credentials = credentials
        self._used: grpc.ChannelCredentials | None = None
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Any] = {}
        self._in_flight: dict[Any, grpc.aio.Channel] = {}
        self._repeatable: set[Any] = set()
        """The calls in flight that may be made again."""
        self._streams: WeakSet[Stream] = WeakSet()
        self._retired: list[grpc.aio.Channel] = []
        self.connection = 0
        """Which connection is used: they are numbered."""
        self._closed = False

    async def ready(self, limit_s: float) -> bool:
        """Wait for the connection; ``False``: nothing was decided within ``limit_s``.

        ``True`` after a failed attempt as well: the next call then fails at once with its cause.
        """
        state = self._open().get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return True
        try:
            await self._clock.wait_for(self._decided(), limit_s)
        except TimeoutError:
            return False
        return True

    async def unary(
        self,
        method: str,
        request: Any,
        *,
        timeout_s: float,
        metadata: Metadata,
        is_repeatable: bool = False,
    ) -> Any:
        """Send one request, and return the one reply to it."""
        channel = self._open()
        is_stream, over = method == "LeaseKeepAlive", asyncio.Event()
        sent = _until(over, request) if is_stream else request
        call = self._calls[method](sent, timeout=timeout_s, metadata=metadata)
        self._in_flight[call] = channel
        if is_repeatable:
            self._repeatable.add(call)
        try:
            return await (_only_reply(call, over) if is_stream else call)
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            if self._closed:
                raise ClosedError("the client was closed") from None
            if is_repeatable and call not in self._repeatable:
                raise LeaderChangedError(
                    "etcd has another leader than when this was sent"
                ) from None
            raise
        finally:
            del self._in_flight[call]
            self._repeatable.discard(call)
            await self._close_retired()

    def end_repeatable(self) -> None:
        """End the calls in flight that may be made again, with :class:`LeaderChangedError`."""
        while self._repeatable:
            self._repeatable.pop().cancel()

    def stream(self, method: str, request: Any, *, metadata: Metadata) -> Stream:
        channel = self._open()
        stream = Stream(self, self._calls[method], request, channel, metadata)
        self._streams.add(stream)
        return stream

    def renew(self) -> Coroutine[Any, Any, None]:
        """Give up the connection, so that the next call makes a new one.

        Unary calls in flight continue on the old channel, which is closed when the last has ended;
        streams on it end at once. What is returned waits for that.
        """
        if self._channel is not None:
            self._retired.append(self._channel)
            self._channel = None
        return self._close_retired()

    async def close(self) -> None:
        self._closed = True
        for call in tuple(self._in_flight):
            call.cancel()
        channels = [*self._retired, *([self._channel] if self._channel is not None else [])]
        # The stubs as well: they keep the channel, and it grpc's own thread, alive.
        self._retired, self._channel, self._calls = [], None, {}
        for channel in channels:
            await self._end_streams(channel)
            await channel.close(grace=None)

    def _open(self) -> grpc.aio.Channel:
        if self._closed:
            raise ClosedError("the client is closed")
        if self._channel is None:
            self.connection += 1
            self._used = None if self._credentials is None else self._credentials.current
            self._channel = _open_channel(self._target, self._used)
            self._calls = _bind(self._channel)
        return self._channel

    async def _decided(self) -> None:
        """Wait for a connection or a failed attempt, of the next channel if this one is given up.

        Raises :class:`ClosedError`.
        """
        if self._credentials and await self._credentials.latest() is not self._used:
            # A channel keeps its credentials, and would be refused forever once they have expired.
            await self.renew()
        while (state := self._open().get_state(try_to_connect=True)) in _UNDECIDED:
            await self._open().wait_for_state_change(state)

    async def _close_retired(self) -> None:
        if not self._retired:
            return
        retired, busy = self._retired, set(self._in_flight.values())
        self._retired = [channel for channel in retired if channel in busy]
        for channel in retired:
            await self._end_streams(channel)
            if channel not in busy:
                await channel.close(grace=None)

    async def _end_streams(self, channel: grpc.aio.Channel) -> None:
        streams = [stream for stream in self._streams if stream.channel is channel]
        for stream in streams:
            stream.drop()
        for stream in streams:
            await stream.ended()


def _being_cancelled() -> bool:
    """Return whether the running task itself was cancelled; ``False`` on Python 3.10."""
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)
    return cancelling is not None and cancelling() > 0
