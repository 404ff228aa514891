"""What a node costs etcd stays below what docs/deploy.md says. Prints what it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.world.group import Group
from tests.library.nodes import join_all, node_settings
from tests.support.servers import EtcdServer

NODES = 64


@pytest.mark.slow
def test_a_node_costs_etcd_no_more_than_the_document_says(
    fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    server = fresh_etcd()
    before = server.metrics()
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Group(node_settings(server, job_id, str(NODES), lease_ttl=30)))
            for _ in range(NODES)
        ]
        assert len({world.rank for world in join_all(nodes)}) == NODES
        after = server.metrics()
        keys = server.keys(JobKeys("/rdzv_etcd", job_id).root)

    def spent(name: str) -> float:
        return after.total(name) - before.total(name)

    size = sum(len(key) + len(value) for key, value in keys.items())
    writes = spent("etcd_server_proposals_committed_total")
    connections = spent("process_open_fds")
    print(f"\n{server.binary.label}: {NODES} nodes: {len(keys)} keys, {size} bytes, {writes:.0f}")
    print(f"  writes, {connections:.0f} connections, {spent('etcd_debugging_mvcc_watcher_total')}")
    print(f"  watchers, {spent('process_resident_memory_bytes') / 1e6:.1f} MB of memory")
    assert len(keys) <= NODES + 10
    assert size <= 500 * NODES + 2000
    assert writes <= 3 * NODES + 10
    assert connections <= NODES + 5
