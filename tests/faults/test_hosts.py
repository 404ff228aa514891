"""Faults of the nodes' own hosts: a node that hangs, a job that hangs as a whole, wrong clocks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.nodes import TTL_S, Nodes, change_after
from tests.faults.test_cluster import take_in_another
from tests.support.servers import EtcdServer

Job = Callable[..., Nodes]


@pytest.mark.parametrize("role", ["leader", "member"])
def test_a_node_is_stopped_beyond_its_ttl_and_goes_on(
    etcd: EtcdServer, job: Job, role: str
) -> None:
    """SIGSTOP, then SIGCONT: the others went on without it, and it joins them again by itself."""
    nodes = job(etcd.endpoint, "2:3", last_call_timeout=30)
    three = nodes.start("a", "b", "c")
    world = nodes.wait_for_world(three)
    leader = nodes.leader(etcd.gateway)
    victim = next(node for node in three if (node.node_id == leader) == (role == "leader"))
    others = [node for node in three if node is not victim]
    victim.freeze()
    frozen_s = time.monotonic()
    two = nodes.wait_for_world(others)
    print(f"measured: {role} frozen: told after {change_after(others, frozen_s):.1f} s")
    victim.thaw()
    thawed_s = time.monotonic()
    again = nodes.wait_for_world(three)
    print(f"measured: {role} back in a world {time.monotonic() - thawed_s:.1f} s after SIGCONT")
    assert again.epoch > two.epoch > world.epoch
    assert [len(node.all("change")) for node in three] == [
        1 if node is victim else 2 for node in three
    ]
    nodes.finish(etcd.gateway)


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


def test_wall_clocks_an_hour_off_make_no_difference(etcd: EtcdServer, job: Job) -> None:
    nodes = job(etcd.endpoint, "2:4", last_call_timeout=30)
    ahead = nodes.start("ahead", wall_skew_s=3600.0)
    behind = nodes.start("behind", wall_skew_s=-3600.0)
    right = nodes.start("right", "other")
    started = [*ahead, *behind, *right]
    nodes.wait_for_world(started)
    nodes.stay_undisturbed(started, TTL_S)
    leader = nodes.leader(etcd.gateway)
    victim = next(node for node in started if node.node_id == leader)
    others = [node for node in started if node is not victim]
    victim.kill()
    killed_s = time.monotonic()
    nodes.wait_for_world(others)
    print(f"measured: a loss was told after {change_after(others, killed_s):.1f} s")
    nodes.finish(etcd.gateway)
