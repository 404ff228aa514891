"""Large values over slow links to several endpoints: they arrive, however long that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from rdzv_etcd.etcd import reads, retry
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Get, Put, Txn
from rdzv_etcd.etcd.reads import read_range
from rdzv_etcd.settings.connection import Connection, Endpoint
from tests.etcd.tools import LIMIT_S, PREFIX, InOrder
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer

LARGE = 800_000
BYTES_PER_S = 4_000_000.0


@pytest.fixture(autouse=True)
def _quick_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the time that a large value takes."""
    for name in ("READ", "REPEATABLE_WRITE"):
        kind = dataclasses.replace(getattr(retry, name), attempt_limit_s=0.05, shared_limit_s=0.05)
        monkeypatch.setattr(retry, name, kind)


@pytest.fixture(params=[1, 2], ids=["one-endpoint", "two-endpoints"])
def ways(etcd_server: EtcdServer, request: pytest.FixtureRequest) -> Iterator[list[FaultBridge]]:
    with ExitStack() as stack:
        bridges = [FaultBridge((etcd_server.host, etcd_server.port)) for _ in range(request.param)]
        for bridge in bridges:
            stack.callback(bridge.close)
        yield bridges


@asynccontextmanager
async def client_by(ways: list[FaultBridge]) -> AsyncIterator[EtcdClient]:
    endpoints = tuple(Endpoint(way.host, way.port) for way in ways)
    client = EtcdClient(Connection(endpoints), InOrder())
    try:
        await client.connect()
        for way in ways:
            way.shape(bytes_per_s=BYTES_PER_S)
        yield client
    finally:
        for way in ways:
            way.shape()
        await client.close()


async def test_a_large_value_is_read(ways: list[FaultBridge], etcd_server: EtcdServer) -> None:
    value = b"v" * LARGE
    etcd_server.gateway.put(PREFIX + b"large", value)
    async with client_by(ways) as client:
        found = await client.get(Get(PREFIX + b"large"), timeout_s=LIMIT_S)
        assert [kv.value for kv in found.kvs] == [value]


async def test_a_large_value_is_sent_once(ways: list[FaultBridge]) -> None:
    """A copy of it would make those that follow wait."""
    key = PREFIX + b"sent by %d" % len(ways)
    async with client_by(ways) as client:
        put = Txn((), (Put(key, b"v" * LARGE),))
        assert (await client.txn(put, timeout_s=LIMIT_S, repeatable=True)).succeeded
        (found,) = (await client.get(Get(key), timeout_s=LIMIT_S)).kvs
        assert found.version == 1


async def test_a_range_is_read_in_parts(
    ways: list[FaultBridge], etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "PART_BYTES", 40_000)
    monkeypatch.setattr(reads, "_FIRST_KEYS", 2)
    keys = [PREFIX + b"range/%03d" % n for n in range(80)]
    for key in keys:
        etcd_server.gateway.put(key, key * 400)
    async with client_by(ways) as client:
        reading = read_range(
            client, PREFIX + b"range/", PREFIX + b"range0", limit_s=lambda: LIMIT_S
        )
        got = [part async for part in reading if part.kvs]
    assert [kv.key for part in got for kv in part.kvs if kv.key in keys] == keys
    sizes = [sum(len(kv.value) for kv in part.kvs) for part in got[:-1]]
    assert max(sizes) <= 40_000
    assert min(sizes[2:]) > 20_000, "many small parts are slow as well"
