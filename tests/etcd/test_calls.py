"""Every call of the port, on real servers: its answer and its errors."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import (
    InvalidRequestError,
    LeaseExistsError,
    LeaseNotFoundError,
    RequestTooLargeError,
)
from rdzv_etcd.etcd import port
from rdzv_etcd.etcd.port import Compare, Delete, Get, Put, Relation, Target, Txn
from tests.etcd.tools import END, PREFIX, client_of, create, put, run
from tests.support.servers import EtcdServer

A = PREFIX + b"calls/a"
B = PREFIX + b"calls/b"


def test_a_guarded_transaction_is_applied_once(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            name = job_id.encode()
            first = await client.txn(create(name, b"x"))
            again = await client.txn(create(name, b"y"))
            assert (first.succeeded, again.succeeded) == (True, False)
            got = await client.get(Get(PREFIX + name))
            assert [(kv.value, kv.version, kv.mod_revision) for kv in got.kvs] == [
                (b"x", 1, first.revision)
            ]

    run(scenario())


def test_results_follow_the_operations_nested_ones_too(etcd_server: EtcdServer) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            inner = Txn((Compare(A, Target.VERSION, Relation.GREATER, 5),), (), (Get(A),))
            request = Txn((), (Put(A, b"1"), Put(B, b"2"), inner, Get(A, B + b"\0")))
            done = await client.txn(request)
            puts, nested, both = done.results[:2], done.results[2], done.results[3]
            assert puts == (port.WriteResult(done.revision), port.WriteResult(done.revision))
            assert isinstance(nested, port.TxnResult)
            assert not nested.succeeded
            assert isinstance(nested.results[0], port.GetResult)
            assert isinstance(both, port.GetResult)
            assert [kv.key for kv in both.kvs] == [A, B]
            gone = await client.txn(Txn((), (Delete(A, B + b"\0"),)))
            assert gone.results == (port.WriteResult(gone.revision),)
            assert not (await client.get(Get(A, B + b"\0"))).kvs

    run(scenario())


@pytest.mark.parametrize(
    ("target", "relation", "operand", "holds"),
    [
        (Target.VERSION, Relation.EQUAL, 1, True),
        (Target.VERSION, Relation.GREATER, 1, False),
        (Target.VALUE, Relation.EQUAL, b"v", True),
        (Target.LEASE, Relation.EQUAL, 0, True),
        (Target.CREATE, Relation.LESS, 1 << 60, True),
        (Target.MOD, Relation.GREATER, 1 << 60, False),
    ],
)
def test_every_guard_is_encoded_as_etcd_understands_it(
    etcd_server: EtcdServer,
    job_id: str,
    target: Target,
    relation: Relation,
    operand: int | bytes,
    holds: bool,
) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            name = job_id.encode()
            await client.txn(put(name, b"v"))
            guard = Compare(PREFIX + name, target, relation, operand)
            assert (await client.txn(Txn((guard,), ()))).succeeded is holds

    run(scenario())


def test_a_range_guard_catches_a_key_created_later(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            key = PREFIX + job_id.encode()
            seen = (await client.txn(put(job_id.encode() + b"/1"))).revision
            guard = Compare(key, Target.CREATE, Relation.LESS, seen + 1, port.prefix_end(key))
            assert (await client.txn(Txn((guard,), ()))).succeeded
            await client.txn(put(job_id.encode() + b"/2"))
            assert not (await client.txn(Txn((guard,), ()))).succeeded

    run(scenario())


def test_a_lease_lives_and_is_revoked_with_its_keys(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            lease = await client.grant(60)
            assert lease.ttl_s == 60
            await client.txn(put(job_id.encode(), b"1", lease.lease_id))
            assert await client.keep_alive(lease.lease_id) == 60
            assert await client.revoke(lease.lease_id)
            assert not await client.revoke(lease.lease_id)
            assert await client.keep_alive(lease.lease_id) == 0
            assert (await client.get(Get(PREFIX + job_id.encode()))).kvs == ()

    run(scenario())


def test_a_taken_lease_id_is_refused(etcd_server: EtcdServer) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            lease = await client.grant(60)
            with pytest.raises(LeaseExistsError) as refused:
                await client.grant(60, lease_id=lease.lease_id)
            assert refused.value.lease_id == lease.lease_id
            await client.revoke(lease.lease_id)

    run(scenario())


def test_a_put_on_a_missing_lease_names_the_lease(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            alive = await client.grant(60)
            gone = await client.grant(60)
            await client.revoke(gone.lease_id)
            for first, second in ((alive, gone), (gone, alive)):
                keys = (PREFIX + job_id.encode(), PREFIX + job_id.encode() + b"2")
                ops = (Put(keys[0], b"", first.lease_id), Put(keys[1], b"", second.lease_id))
                with pytest.raises(LeaseNotFoundError) as missing:
                    await client.txn(Txn((), ops))
                assert missing.value.lease_id == gone.lease_id
            await client.revoke(alive.lease_id)

    run(scenario())


def test_a_request_beyond_the_servers_limit_is_refused(etcd_server: EtcdServer) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            for size in (1_600_000, 5_000_000):  # beyond etcd's limit, beyond its gRPC limit
                with pytest.raises(RequestTooLargeError):
                    await client.txn(put(b"large", b"x" * size))

    run(scenario())


def test_a_large_answer_is_read_whole(etcd_server: EtcdServer, job_id: str) -> None:
    """gRPC's default limit of 4 MiB for a message received does not apply."""

    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            for part in range(5):
                await client.txn(put(job_id.encode() + b"/%d" % part, b"x" * 1_200_000))
            key = PREFIX + job_id.encode()
            got = await client.get(Get(key, port.prefix_end(key)))
            assert sum(len(kv.value) for kv in got.kvs) == 6_000_000
            await client.txn(Txn((), (Delete(key, port.prefix_end(key)),)))

    run(scenario())


def test_a_malformed_request_is_told_apart(etcd_server: EtcdServer) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            with pytest.raises(InvalidRequestError, match="duplicate key"):
                await client.txn(Txn((), (Put(A, b"1"), Put(A, b"2"))))

    run(scenario())


def test_ranges_limits_and_counts(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            key = PREFIX + job_id.encode() + b"/"
            for name in (b"b", b"a", b"c"):
                await client.txn(put(job_id.encode() + b"/" + name))
            end = port.prefix_end(key)
            assert [kv.key[-1:] for kv in (await client.get(Get(key, end))).kvs] == [
                b"a",
                b"b",
                b"c",
            ]
            limited = await client.get(Get(key, end, limit=2))
            assert (len(limited.kvs), limited.count) == (2, 3)
            counted = await client.get(Get(key, end, count_only=True))
            assert (counted.kvs, counted.count) == ((), 3)
            names = await client.get(Get(key, end, keys_only=True))
            assert {kv.value for kv in names.kvs} == {b""}

    run(scenario())


def test_many_calls_at_once_share_one_client(etcd_server: EtcdServer, job_id: str) -> None:
    async def scenario() -> None:
        async with client_of(etcd_server) as client:
            name = job_id.encode()
            outcomes = await asyncio.gather(*(client.txn(create(name)) for _ in range(50)))
            assert [done.succeeded for done in outcomes].count(True) == 1
            await client.txn(Txn((), (Delete(PREFIX, END),)))

    run(scenario())
