"""What the etcd tests share: running coroutines, short ways to say puts, scripts in a subprocess.

Knows the client under test and asyncio; starts no server.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd import port
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.retry import FAILBACK_AFTER_S
from rdzv_etcd.settings.connection import Connection, Credentials, Endpoint, Tls
from tests.support.processes import run as run_program
from tests.support.servers import EtcdServer

T = TypeVar("T")

LIMIT_S = 60.0
"""Longer than anything here takes on a slow machine; only a hang reaches it."""

PREFIX, END = b"/rdzv_etcd/t/", b"/rdzv_etcd/t0"


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run an async test to its end in a loop of its own; raises if it leaves a task behind."""

    async def guarded() -> T:
        result = await asyncio.wait_for(test, 4 * LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # gRPC's own tasks see a cancelled call to its end
            _, left = await asyncio.wait(left, timeout=LIMIT_S)
        assert not left, f"tasks left behind: {left}"
        return result

    return asyncio.run(guarded())


def connection(
    *servers: EtcdServer | Endpoint,
    tls: Tls | None = None,
    credentials: Credentials | None = None,
    request_timeout_s: float = 30.0,
    connect_timeout_s: float = 30.0,
) -> Connection:
    return Connection(
        tuple(Endpoint(server.host, server.port) for server in servers),
        tls,
        credentials,
        request_timeout_s,
        connect_timeout_s,
    )


@asynccontextmanager
async def client_of(
    *servers: EtcdServer | Endpoint,
    near: int | None = None,
    readable: bytes | None = None,
    failback_after_s: float = FAILBACK_AFTER_S,
    **options: Any,
) -> AsyncIterator[EtcdClient]:
    """A client of the servers, in this order, but ``near`` first; closed at the end."""
    way = connection(*servers, **options)
    here = () if near is None else (way.endpoints[near],)
    client = EtcdClient(
        way, InOrder(), near=here, readable=readable, failback_after_s=failback_after_s
    )
    try:
        yield client
    finally:
        await client.close()


async def failure(*servers: EtcdServer | Endpoint, **options: Any) -> EtcdError:
    """The error of the first contact."""
    async with client_of(*servers, **options) as client:
        with pytest.raises(EtcdError) as failed:
            await client.connect()
        return failed.value


class InOrder(SystemClock):
    """The system's clock, without jitter: the first endpoint is the first one used."""

    def wall_s(self) -> float:
        raise AssertionError("the etcd layer has no use for wall-clock time")

    def jitter(self, upto_s: float) -> float:
        return 0.0


def put(name: bytes, value: bytes = b"1", lease_id: int = 0) -> port.Txn:
    """An unguarded put of one key of the tests' range."""
    return port.Txn((), (port.Put(PREFIX + name, value, lease_id),))


def create(name: bytes, value: bytes = b"1") -> port.Txn:
    """A put guarded by the key not existing."""
    key = PREFIX + name
    absent = port.Compare(key, port.Target.VERSION, port.Relation.EQUAL, 0)
    return port.Txn((absent,), (port.Put(key, value),))


async def soon(awaitable: Awaitable[T]) -> T:
    """Await with a limit that only a hang reaches."""
    return await asyncio.wait_for(awaitable, LIMIT_S)


async def in_background(action: Callable[[], T]) -> T:
    """Run a blocking action of the test (stopping a server) beside the loop."""
    return await asyncio.get_running_loop().run_in_executor(None, action)


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter with warnings as errors."""
    return run_program([sys.executable, "-W", "error", "-c", script, *arguments], limit_s=LIMIT_S)
