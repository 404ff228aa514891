"""Reads that are given up half-way: etcd must not notice, nor be harmed."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import EtcdError, EtcdPermissionError
from rdzv_etcd.etcd.messages import txn_request
from rdzv_etcd.etcd.port import Compare, Get, Put, Relation, Target, Txn
from rdzv_etcd.settings.connection import Credentials
from tests.etcd.tools import END, PREFIX, client_of, in_background, put, soon
from tests.support.servers import USER, USER_PASSWORD, EtcdServer

pytestmark = pytest.mark.every_etcd

READS = tuple(Get(PREFIX + b"read%d" % n) for n in range(100))
ABSENT = Compare(PREFIX + b"read0", Target.VERSION, Relation.EQUAL, 0)


@pytest.mark.parametrize(
    "request_",
    [
        Txn((), READS),
        Txn((ABSENT,), (), READS),
        Txn((ABSENT,), READS, READS),
        Txn((), (Txn((ABSENT,), READS, READS),)),
    ],
    ids=["reads", "reads-otherwise", "reads-either-way", "nested-reads"],
)
async def test_etcd_outlives_transactions_whose_caller_is_gone(
    server: EtcdServer, request_: Txn
) -> None:
    """etcd up to 3.5.4 ends when it applies one that only reads (its issue 14110)."""
    async with client_of(server) as client:
        puts = tuple(Put(get.key, b"1") for get in READS)
        revision = (await client.txn(Txn((), puts))).revision

        async def give_up(after_s: float) -> None:
            try:
                await client.txn(request_, timeout_s=after_s)
            except EtcdError:  # no time for an answer, or not enough of it
                return

        for _ in range(15):
            await soon(asyncio.gather(*(give_up(0.001 + 0.0005 * step) for step in range(40))))
            assert server.running, server.log_text()[-2000:]
        done = await client.txn(request_)  # and it answers as if nothing had been
        assert (await client.get(Get(PREFIX, END))).revision == done.revision == revision
        await in_background(server.stop)
    assert "panic" not in server.log_text()


async def test_a_transaction_that_reads_needs_no_right_to_write(server: EtcdServer) -> None:
    for n in range(2):
        server.gateway.put(PREFIX + b"read%d" % n, b"v")
    server.enable_auth(b"/elsewhere/")
    server.gateway.grant_prefix("trainers", PREFIX, "READ")
    async with client_of(server, credentials=Credentials(USER, USER_PASSWORD)) as client:
        before = (await client.get(Get(PREFIX))).revision
        for guards in ((), (ABSENT,)):  # the second one fails
            done = await client.txn(Txn(guards, READS[:2], READS[:1]))
            assert done.revision == before
            assert [getattr(read, "count", None) for read in done.results] == (
                [1] if guards else [1, 1]
            )
        with pytest.raises(EtcdPermissionError):
            await client.txn(put(b"read0"))


def test_only_transactions_that_read_are_changed() -> None:
    writes = put(b"x")
    assert [len(txn_request(writes).success), len(txn_request(writes).failure)] == [1, 0]
    for reads in (Txn((), READS), Txn((ABSENT,), ()), Txn((ABSENT,), READS, READS)):
        message = txn_request(reads)
        kinds = {op.WhichOneof("request") for op in (*message.success, *message.failure)}
        assert kinds - {"request_range"}
        assert not kinds & {"request_put", "request_delete_range"}
