"""The etcd cluster's leader is killed, at every moment of a round that forms."""

from __future__ import annotations

import time

import pytest

from tests.faults.nodes import NodeProcess, Nodes
from tests.faults.servers import Job
from tests.support.servers import EtcdCluster, EtcdServer


def formed_without(leader: EtcdServer, nodes: Nodes, members: list[NodeProcess]) -> None:
    """Kill etcd's leader, unless it is dead: the world is formed."""
    leader.kill()
    killed_s = time.monotonic()
    nodes.wait_for_world(members)
    print(f"measured: world {time.monotonic() - killed_s:.1f} s after etcd's leader was killed")


@pytest.mark.slow
def test_the_etcd_leader_dies_while_nodes_connect(cluster: EtcdCluster, job: Job) -> None:
    """At several moments around their first requests: none gives up."""
    for moment_s in (0.3, 0.4):
        nodes = job(cluster.endpoints, "4")
        four = nodes.start("a", "b", "c", "d")
        time.sleep(moment_s)  # the moment of the fault is what is varied
        leader = cluster.leader()
        formed_without(leader, nodes, four)
        leader.start()
        nodes.finish(cluster.gateway)


def test_the_etcd_leader_dies_before_anybody_arrives(cluster: EtcdCluster, job: Job) -> None:
    nodes = job(cluster.endpoints, "3")
    three = nodes.start("a", "b", "c", hold=True)
    nodes.wait_started(three)
    leader = cluster.leader()
    leader.kill()
    for node in three:
        node.release()
    formed_without(leader, nodes, three)
    nodes.finish(cluster.gateway)


@pytest.mark.parametrize(
    ("pause", "moment_s"),
    [
        pytest.param(False, None, id="while nodes wait"),
        pytest.param(True, 0.2, id="with the closing write stuck in it", marks=pytest.mark.slow),
        pytest.param(False, 0.0, id="around the closing write", marks=pytest.mark.slow),
        pytest.param(False, 0.03, id="just after the closing write", marks=pytest.mark.slow),
    ],
)
def test_the_etcd_leader_dies_when_the_last_node_comes(
    cluster: EtcdCluster, job: Job, pause: bool, moment_s: float | None
) -> None:
    conf = {} if moment_s is None else {"settle": 0}
    # A lease of which nobody knows whether the round has it ends by itself.
    nodes = job(cluster.endpoints, "3", job_lease_ttl=10, **conf)
    first = nodes.start("a", "b")
    (last,) = nodes.start("c", hold=True)
    nodes.wait_started([*first, last])
    nodes.wait_present(cluster.gateway, first)
    leader = cluster.leader()
    if moment_s is None:
        leader.kill()
    if pause:
        leader.pause()
    last.release()
    time.sleep(moment_s or 0.0)  # the moment of the fault is what is varied
    formed_without(leader, nodes, [*first, last])
    nodes.finish(cluster.gateway)
