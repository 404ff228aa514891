"""Faults of the etcd cluster: leader killed, quorum lost, rolling restart, all data gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.nodes import TTL_S, NodeProcess, Nodes
from tests.support.servers import EtcdCluster

Job = Callable[..., Nodes]


def take_in_another(nodes: Nodes, members: list[NodeProcess]) -> None:
    """The job is as alive as ever: a node that comes late is taken in."""
    late = nodes.start("late")
    nodes.wait_for_world([*members, *late])


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


def test_the_etcd_leader_dies_while_nodes_work(cluster: EtcdCluster, job: Job) -> None:
    nodes = job(cluster.endpoints, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    cluster.leader().kill()
    nodes.stay_undisturbed(three, 2 * TTL_S)
    take_in_another(nodes, three)
    nodes.finish(cluster.gateway)


@pytest.mark.parametrize(
    "away_s", [3 * TTL_S, pytest.param(60, marks=pytest.mark.slow_faults)], ids=lambda s: f"{s}s"
)
def test_quorum_is_lost_while_nodes_work(cluster: EtcdCluster, job: Job, away_s: float) -> None:
    nodes = job(cluster.endpoints, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    for member in cluster.members[:2]:
        member.kill()
    nodes.stay_undisturbed(three, away_s)
    for member in cluster.members[:2]:
        member.start(wait=False)
    nodes.stay_undisturbed(three, 2 * TTL_S)
    take_in_another(nodes, three)
    nodes.finish(cluster.gateway)


def test_a_rolling_restart_disturbs_nobody(cluster: EtcdCluster, job: Job) -> None:
    nodes = job(cluster.endpoints, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    for member in cluster.members:
        member.restart()
    nodes.assert_undisturbed(three, before)
    nodes.stay_undisturbed(three, TTL_S)
    take_in_another(nodes, three)
    nodes.finish(cluster.gateway)


def test_all_data_is_wiped_while_nodes_work(cluster: EtcdCluster, job: Job) -> None:
    """The members put themselves and their round back into the new cluster; epochs still grow."""
    nodes = job(cluster.endpoints, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    cluster.wipe()
    wiped_s = time.monotonic()
    nodes.wait_present(cluster.gateway, three)
    print(f"measured: all present {time.monotonic() - wiped_s:.1f} s after the cluster was ready")
    nodes.assert_undisturbed(three, before)
    nodes.stay_undisturbed(three, 2 * TTL_S)
    take_in_another(nodes, three)
    nodes.finish(cluster.gateway)
