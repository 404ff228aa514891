"""gRPC channels to etcd: with which options, which calls, and the blocking kind.

Knows gRPC channels of both kinds. Must not know event loops, retries, tokens, or what calls mean.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from rdzv_etcd.clock import Clock
from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.forks import note_use
from rdzv_etcd.etcd.quiet import grpc

Credentials: TypeAlias = Callable[[], "grpc.ChannelCredentials | None"]
"""Tells with which credentials the next connection is to be made; the same object: no others."""

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
_BLOCKING_OPTIONS: tuple[tuple[str, int], ...] = (
    # Only what may be repeated is sent there, and the loop repeats it: a twelfth of a call's CPU.
    ("grpc.enable_retries", 0),
    ("grpc.minimal_stack", 1),
)


def open_channel(kind: Any, target: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """Return a channel, encrypted if there are credentials; ``kind``: ``grpc`` or ``grpc.aio``."""
    note_use()
    options = _OPTIONS + _BLOCKING_OPTIONS if kind is grpc else _OPTIONS
    if credentials is None:
        return kind.insecure_channel(target, options=options)
    return kind.secure_channel(target, credentials, options=options)


def bind(channel: Any) -> dict[str, Any]:
    """Return the calls this package uses, by name, on a channel of either kind."""
    rpc = stubs.load()
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


WORTH_CALLS = 8
_WORTH_WITHIN_S = 10.0
"""A connection costs as much as is saved by about six calls (1.2 ms of CPU here, some 0.5 at etcd,
0.27 saved by each). An agent makes about four calls in a round: it does without."""

_AT_ONCE = 4
"""More threads that block at the same time wake each other up more than the one loop would: 4,096
agents in 8 processes passed a barrier in 8.0 s with no limit, in 6.4 to 6.9 s by the loop."""


class BlockingCalls:
    """Calls that block their thread, on a connection of their own, which the first one makes.

    Thread-safe. It starts no thread: each caller waits in gRPC for its own answer, and signals
    interrupt that within 0.2 s.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials,
        clock: Clock,
        worth_calls: int = WORTH_CALLS,
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._used: grpc.ChannelCredentials | None = None
        self._clock = clock
        self._worth_calls = worth_calls
        self._wanted_at_s: deque[float] = deque(maxlen=worth_calls)
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._channel: grpc.Channel | None = None
        self._calls: dict[str, Any] = {}
        self._closed = False

    def worth_it(self) -> bool:
        """Tell whether so many calls were wanted lately that they deserve a connection.

        Asking counts as wanting one. While some threads block already, others should not.
        """
        now_s, wanted = self._clock.now_s(), self._wanted_at_s
        # Other threads append meanwhile, so it must not be iterated over; once full it stays full.
        enough = len(wanted) == self._worth_calls
        since_s = wanted[0] if wanted else now_s
        wanted.append(now_s)
        return enough and now_s - since_s <= _WORTH_WITHIN_S and len(self._busy) < _AT_ONCE

    def call(self, method: str, request: Any, *, timeout_s: float, metadata: Metadata) -> Any:
        """Return the answer. Raises ``grpc.RpcError``; :class:`ValueError` if it is closed."""
        call = self._calls.get(method) or self._open()[method]
        try:
            self._busy.add(threading.get_ident())
            return call(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError:
            if self._credentials() is not self._used:
                self.renew()
            raise
        finally:
            self._busy.discard(threading.get_ident())

    def renew(self) -> None:
        """Let the next call make a new connection; the old one goes with the calls on it."""
        with self._lock:
            self._channel, self._calls = None, {}

    def close(self) -> None:
        """End the calls under way; idempotent."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._calls, self._closed = {}, True
        if channel is not None:
            channel.close()

    def _open(self) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise ValueError("closed")
            if self._channel is None:
                self._used = self._credentials()
                self._channel = open_channel(grpc, self._target, self._used)
                self._calls = bind(self._channel)
            return self._calls
