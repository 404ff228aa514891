"""What a contract test works with: connections to one etcd, and what only an operator can do.

Knows how to make each kind of etcd; the tests do not.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Etcd,
    Event,
    Get,
    GetResult,
    KeyValue,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
    Watch,
    WatchBatch,
    prefix_end,
)
from rdzv_etcd.settings.connection import Connection, Credentials, Endpoint
from rdzv_etcd.testing import Link, MemoryEtcd, SimClock, SimLoop, run_simulation
from tests.etcd.tools import LIMIT_S, soon
from tests.support.roles import Lack, set_lacks
from tests.support.servers import ROLE, USER, USER_PASSWORD, EtcdServer

T = TypeVar("T")


class RealOperator:
    """Hurts a real server. Blocks the loop on purpose: the server dies with its parent thread."""

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self._granted: list[tuple[bytes, bytes]] | None = None
        """What the role has, once users have to log in."""
        self.compact = server.gateway.compact
        self.wipe, self.restart, self.save, self.restore = (
            server.wipe, server.restart, server.save, server.restore,
        )  # fmt: skip
        self.fall_silent, self.speak = server.pause, server.resume

    def connect(self) -> Etcd:
        endpoint = Endpoint(self._server.host, self._server.port)
        login = None if self._granted is None else Credentials(USER, USER_PASSWORD)
        return EtcdClient(Connection((endpoint,), credentials=login, request_timeout_s=LIMIT_S))

    def set_lacks(self, *lacks: Lack) -> None:
        """Let connections that are made from now on, and all made after the first call, lack these
        permissions and no others. Ranges in order, none within another."""
        gateway = self._server.gateway
        if self._granted is None:
            self._granted = []
            self._server.enable_auth()
        for each in self._granted:
            gateway.revoke_range(ROLE, *each)
        self._granted.clear()
        start = b"\x00"
        for lack in lacks:
            end = lack.range_end or lack.key + b"\x00"
            self._grant(start, lack.key, "READWRITE")
            if lack.reads is not lack.writes:
                self._grant(lack.key, end, "WRITE" if lack.reads else "READ")
            start = end
        self._grant(start, b"\x00", "READWRITE")

    def _grant(self, key: bytes, range_end: bytes, kind: str) -> None:
        assert self._granted is not None
        self._server.gateway.grant_range(ROLE, key, range_end, kind)
        self._granted.append((key, range_end))


class MemoryOperator:
    """Hurts the in-memory etcd."""

    def __init__(self, server: MemoryEtcd) -> None:
        self._server = server
        self._saved = server.save()
        self._links: list[Link] = []
        self.compact, self.wipe = server.compact, server.wipe
        self.restart = partial(server.restart, downtime_s=0.2)

    def connect(self) -> Etcd:
        connection = self._server.connect()
        self._links.append(connection.link)
        return connection

    def fall_silent(self) -> None:
        for link in self._links:
            link.partition(silent=True)

    def speak(self) -> None:
        for link in self._links:
            link.heal()

    def save(self) -> None:
        self._saved = self._server.save()

    def restore(self) -> None:
        self._server.restore(self._saved)

    def set_lacks(self, *lacks: Lack) -> None:
        set_lacks(self._server, *lacks)


Operator: TypeAlias = "RealOperator | MemoryOperator"
"""One etcd cluster, from its operator's side."""


class Lab:
    """One test's view of one etcd. ``etcd`` is a connection; ``root`` a prefix of its own."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.root = f"contract/{uuid.uuid4().hex[:8]}/".encode()
        self.end = prefix_end(self.root)
        self._connections: list[Etcd] = []
        self.etcd = self.connect()

    def connect(self) -> Etcd:
        """Return another connection; all are closed after the test."""
        connection = self.operator.connect()
        self._connections.append(connection)
        return connection

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    def key(self, name: str) -> bytes:
        return self.root + name.encode()

    # -- shorthands -------------------------------------------------------------------------------

    async def do(self, *ops: Op, guards: tuple[Compare, ...] = ()) -> TxnResult:
        """Do all operations in one transaction."""
        return await self.etcd.txn(Txn(guards, ops))

    async def put(self, name: str, value: bytes = b"v", lease_id: int = 0) -> int:
        return (await self.do(Put(self.key(name), value, lease_id))).revision

    async def delete(self, name: str) -> int:
        return (await self.do(Delete(self.key(name)))).revision

    async def read(self, name: str) -> KeyValue | None:
        kvs = (await self.etcd.get(Get(self.key(name)))).kvs
        return kvs[0] if kvs else None

    async def all(self) -> GetResult:
        return await self.etcd.get(Get(self.root, self.end))

    async def revision(self) -> int:
        return (await self.all()).revision

    async def holds(
        self,
        name: str,
        target: Target,
        relation: Relation,
        operand: int | bytes,
        end: str | None = None,
    ) -> bool:
        """Evaluate one guard."""
        range_end = None if end is None else self.key(end)
        guard = Compare(self.key(name), target, relation, operand, range_end)
        return (await self.etcd.txn(Txn((guard,), ()))).succeeded

    def watch(
        self, *, start_revision: int, puts_only: bool = False, mark_resumes: bool = False
    ) -> Watch:
        """Watch everything under ``root``."""
        return self.etcd.watch(
            self.root,
            self.end,
            start_revision=start_revision,
            puts_only=puts_only,
            mark_resumes=mark_resumes,
        )


async def events_of(watch: Watch, count: int) -> list[Event]:
    """Return the next ``count`` events (all of the last batch, if that has more)."""
    found: list[Event] = []
    while len(found) < count:
        found += (await next_batch(watch)).events
    return found


async def next_batch(watch: Watch) -> WatchBatch:
    return await soon(anext(aiter(watch)))


Runner = Callable[[Callable[[Lab], Coroutine[Any, Any, None]]], None]


def run_on_server(server: EtcdServer) -> Runner:
    """Return a runner of tests on a real server."""

    def run(test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(_in_lab(RealOperator(server), test))

    return run


def run_in_memory(test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    """Run a test on the in-memory etcd in real time."""

    async def main() -> None:
        async with MemoryEtcd() as server:
            await _in_lab(MemoryOperator(server), test)

    asyncio.run(main(), debug=True)


def run_simulated(test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    """Run a test on the in-memory etcd, five schedules long, with slow and reordered messages."""

    async def main(loop: SimLoop) -> None:
        async with MemoryEtcd(SimClock(loop), seed=loop.seed) as server:

            class Slow(MemoryOperator):
                def connect(self) -> Etcd:
                    connection = super().connect()
                    self._links[-1].delay(0.0, 0.01)
                    return connection

            await _in_lab(Slow(server), test)

    for seed in range(5):
        run_simulation(main, seed)


async def _in_lab(operator: Operator, test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    lab = Lab(operator)
    try:
        await test(lab)
    finally:
        await lab.close()
