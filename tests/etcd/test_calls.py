"""What only real servers show of single calls; ``tests/contract`` has all else, on them too."""

from __future__ import annotations

import pytest

from rdzv_etcd.errors import LeaseNotFoundError
from rdzv_etcd.etcd.port import Delete, Get, Put, Txn, prefix_end
from tests.etcd.tools import PREFIX, client_of, put
from tests.support.servers import EtcdServer

A = PREFIX + b"calls/a"


async def test_a_put_on_a_missing_lease_names_the_lease(
    etcd_server: EtcdServer, job_id: str
) -> None:
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


async def test_a_large_answer_is_read_whole(etcd_server: EtcdServer, job_id: str) -> None:
    """gRPC's default limit of 4 MiB for a message received does not apply."""
    async with client_of(etcd_server) as client:
        for part in range(5):
            await client.txn(put(job_id.encode() + b"/%d" % part, b"x" * 1_200_000))
        key = PREFIX + job_id.encode()
        got = await client.get(Get(key, prefix_end(key)))
        assert sum(len(kv.value) for kv in got.kvs) == 6_000_000
        await client.txn(Txn((), (Delete(key, prefix_end(key)),)))
