"""The disk of one etcd member of three hangs, the one that serves the rendezvous leader."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.nodes import Nodes
from tests.support.hung_disk import REAL_FSYNC, connected_to, hung_disk
from tests.support.servers import EtcdCluster


@pytest.fixture
def cluster(fresh_cluster: Callable[..., EtcdCluster]) -> EtcdCluster:
    return fresh_cluster(3, flags=REAL_FSYNC)


@pytest.mark.slow
@pytest.mark.parametrize("links", ["peer_links", "leases"])
def test_a_killed_member_is_lost_while_the_leader_s_etcd_member_hangs(
    links: str, cluster: EtcdCluster, job: Callable[..., Nodes]
) -> None:
    """Keep-alives, pings and forwarded writes go through there; watches and reads do not."""
    etcd_leader = cluster.leader()
    others = [member for member in cluster.members if member is not etcd_leader]
    nodes = job(etcd_leader.target, "2:3", peer_links=int(links == "peer_links"))
    leader = nodes.start("a", endpoint=",".join(member.target for member in others))
    nodes.wait_started(leader)
    nodes.wait_present(etcd_leader.gateway, leader)  # it claims the lead as it arrives
    assert nodes.leader(etcd_leader.gateway) == leader[0].node_id
    rest = nodes.start("b", "c")
    nodes.wait_for_world([*leader, *rest])
    (home,) = connected_to(leader[0].process.pid, others)
    with hung_disk(home):
        rest[1].kill()
        killed_s = time.monotonic()
        nodes.wait_for_world([*leader, rest[0]])
        print(f"measured: world {time.monotonic() - killed_s:.1f} s after the kill")
    nodes.finish(etcd_leader.gateway)
