"""gRPC channels to etcd: with which options, and which calls.

Knows gRPC channels of both kinds. Must not know event loops, retries, tokens, or what calls mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.forks import note_use
from rdzv_etcd.etcd.grpc_start import grpc

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


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Return a channel, encrypted if there are credentials."""
    note_use()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)


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
