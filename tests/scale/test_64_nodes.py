"""64 nodes form rounds quickly, at a cost that etcd's own counters show."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rdzv_etcd.protocol.keys import JobKeys
from tests.library.nodes import groups, join_all, node_settings
from tests.support.servers import EtcdServer

NODES = 64
MOST_REQUESTS = 6.0
"""Requests to etcd per node and round; a stream counts as one."""
ROUND_S = 30.0
"""For a round on a slow machine; see the printed times for what it takes."""


@pytest.mark.slow
def test_nodes_cost_etcd_no_more_than_docs_deploy_says(
    fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    """The first round's requests include connecting."""
    etcd = fresh_etcd()
    costs, times, pages = [], [], [etcd.metrics()]
    settings = node_settings(etcd, job_id, str(NODES), lease_ttl=10, last_call_timeout=60)
    with groups(settings, NODES) as nodes:
        for number in (1, 2):
            began_s = time.monotonic()
            worlds = join_all(nodes)
            times.append(time.monotonic() - began_s)
            assert sorted(world.rank for world in worlds) == list(range(NODES))
            assert {world.size for world in worlds} == {NODES}
            pages.append(etcd.metrics())
            before, after = (page.requests() for page in pages[-2:])
            spent = {name: count - before.get(name, 0.0) for name, count in sorted(after.items())}
            costs.append(sum(spent.values()) / NODES)
            each = ", ".join(f"{name} {count:.0f}" for name, count in spent.items() if count)
            print(f"round {number}: {times[-1]:.3f} s, {costs[-1]:.2f} requests per node ({each})")
        keys = etcd.keys(JobKeys("/rdzv_etcd", job_id).root)
    assert max(times) < ROUND_S
    assert max(costs) <= MOST_REQUESTS

    size = sum(len(key) + len(value) for key, value in keys.items())
    names = {
        "writes": "etcd_server_proposals_committed_total",
        "connections": "process_open_fds",
        "watchers": "etcd_debugging_mvcc_watcher_total",
        "bytes of memory": "process_resident_memory_bytes",
    }
    first = {what: pages[1].total(name) - pages[0].total(name) for what, name in names.items()}
    print(f"{etcd.binary.label}: {len(keys)} keys, {size} bytes in them; first round: {first}")
    assert len(keys) <= NODES + 10
    assert size <= 500 * NODES + 2000
    assert first["writes"] <= 3 * NODES + 10
    assert first["connections"] <= NODES + 5
