"""Faults of the nodes' own hosts: a job that hangs as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.nodes import TTL_S, Nodes, take_in_another
from tests.support.servers import EtcdServer

Job = Callable[..., Nodes]


@pytest.mark.slow
def test_all_nodes_are_stopped_beyond_their_ttl_and_go_on(etcd: EtcdServer, job: Job) -> None:
    """As when a whole cluster of virtual machines is suspended: no restart."""
    nodes = job(etcd.endpoint, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    for node in three:
        node.freeze()
    nodes.wait_present(etcd.gateway, [])
    for node in three:
        node.thaw()
        time.sleep(TTL_S / 6)  # machines do not wake up together
    nodes.wait_present(etcd.gateway, three)
    nodes.stay_undisturbed(three, 2 * TTL_S)
    nodes.assert_undisturbed(three, before)
    take_in_another(nodes, three)
    nodes.finish(etcd.gateway)
