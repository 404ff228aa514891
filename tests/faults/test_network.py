"""Faults of the network between nodes and a living etcd, and of all the nodes' hosts at once."""

from __future__ import annotations

import time

import pytest

from tests.faults.nodes import TTL_S, take_in_another
from tests.faults.servers import Job
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer


def test_connections_break_while_nodes_work_and_while_they_wait(
    etcd: EtcdServer, bridge: FaultBridge, job: Job
) -> None:
    """A broken connection, even an unannounced one, costs neither a round nor the lease."""
    nodes = job(bridge.endpoint, "3:4", last_call_timeout=5)  # a watch must be back within it
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    for breaks in (bridge.reset, bridge.half_open):
        breaks()
        nodes.stay_undisturbed(three, 1.5 * TTL_S)
    bridge.half_open()
    late = nodes.start("late", endpoint=etcd.endpoint)
    bridge.reset()
    nodes.wait_for_world([*three, *late])
    assert [len(node.all("change")) for node in three] == [1, 1, 1]
    nodes.finish(etcd.gateway)


@pytest.mark.slow
def test_200_ms_each_way_with_5_percent_loss_costs_neither_lease_nor_connection(
    etcd: EtcdServer, bridge: FaultBridge, job: Job
) -> None:
    """At the edge of what the TTL allows. A reply that comes late because something had to be sent
    again is waited for: giving up the connection would cost all its watches, and a new one is no
    faster. A newcomer and a real loss re-form the world."""
    # Twelve round trips; seven are enough on a machine that is not slow itself.
    nodes = job(bridge.endpoint, "2:4", last_call_timeout=2, lease_ttl=5)
    bridge.shape(delay_s=0.2, jitter_s=0.02, loss=0.05)
    started_s = time.monotonic()
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    print(f"measured: first world after {time.monotonic() - started_s:.1f} s")
    connections = bridge.connections
    nodes.stay_undisturbed(three, 8 * TTL_S)
    given_up = bridge.connections - connections
    print(f"measured: {given_up} connections given up in {8 * TTL_S} s")
    assert given_up <= 6, "it was about one a second and node when replies had to be in time"
    late = nodes.start("late")
    nodes.wait_for_world([*three, *late])
    three[0].kill()
    killed_s = time.monotonic()
    nodes.wait_for_world([*three[1:], *late])
    print(f"measured: world without the killed after {time.monotonic() - killed_s:.1f} s")
    bridge.heal()
    nodes.finish(etcd.gateway)


@pytest.mark.slow
def test_all_nodes_are_stopped_beyond_their_ttl_and_continue(etcd: EtcdServer, job: Job) -> None:
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
