"""The etcd cluster's leader is killed, at every moment of a round that forms."""

from __future__ import annotations

import time

import pytest

from tests.faults.servers import Job
from tests.support.servers import EtcdCluster


@pytest.mark.slow
def test_the_etcd_leader_dies_while_nodes_connect(cluster: EtcdCluster, job: Job) -> None:
    """At several moments around their first requests: none gives up."""
    for moment_s in (0.3, 0.4):
        nodes = job(cluster.endpoints, "4")
        four = nodes.start("a", "b", "c", "d")
        time.sleep(moment_s)  # the moment of the fault is what is varied
        leader = cluster.leader()
        leader.kill()
        killed_s = time.monotonic()
        nodes.wait_for_world(four)
        took_s = time.monotonic() - killed_s
        print(f"measured: {moment_s}: world {took_s:.1f} s after etcd's leader was killed")
        leader.start()
        nodes.finish(cluster.gateway)


def test_the_etcd_leader_dies_before_anybody_arrives(cluster: EtcdCluster, job: Job) -> None:
    nodes = job(cluster.endpoints, "3")
    three = nodes.start("a", "b", "c", hold=True)
    nodes.wait_started(three)
    cluster.leader().kill()
    killed_s = time.monotonic()
    for node in three:
        node.release()
    nodes.wait_for_world(three)
    print(f"measured: world {time.monotonic() - killed_s:.1f} s after etcd's leader was killed")
    nodes.finish(cluster.gateway)


def test_the_etcd_leader_dies_while_nodes_wait(cluster: EtcdCluster, job: Job) -> None:
    nodes = job(cluster.endpoints, "3")
    first = nodes.start("a", "b")
    last = nodes.start("c", hold=True)
    nodes.wait_started([*first, *last])
    nodes.wait_present(cluster.gateway, first)
    cluster.leader().kill()
    killed_s = time.monotonic()
    last[0].release()
    nodes.wait_for_world([*first, *last])
    print(f"measured: world {time.monotonic() - killed_s:.1f} s after etcd's leader was killed")
    nodes.finish(cluster.gateway)


@pytest.mark.slow
def test_the_etcd_leader_dies_while_the_round_is_closed(cluster: EtcdCluster, job: Job) -> None:
    """At several moments around the closing write, and with the write stuck in the dying leader."""
    for number, (pause, moment_s) in enumerate([(True, 0.2), (False, 0.0), (False, 0.03)]):
        nodes = job(cluster.endpoints, "3", settle=0)
        first = nodes.start("a", "b")
        last = nodes.start("c", hold=True)
        nodes.wait_started([*first, *last])
        nodes.wait_present(cluster.gateway, first)
        leader = cluster.leader()
        if pause:
            leader.pause()
        last[0].release()
        time.sleep(moment_s)  # the moment of the fault is what is varied
        leader.kill()
        killed_s = time.monotonic()
        nodes.wait_for_world([*first, *last])
        took_s = time.monotonic() - killed_s
        print(f"measured: {number}: world {took_s:.1f} s after etcd's leader was killed")
        leader.start()
        nodes.finish(cluster.gateway)
