"""Faults of the network between nodes and a living etcd."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.nodes import TTL_S, Nodes, take_in_another
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer

Job = Callable[..., Nodes]


@pytest.mark.slow
def test_all_connections_are_refused_for_several_ttls(
    etcd: EtcdServer, bridge: FaultBridge, job: Job
) -> None:
    nodes = job(bridge.endpoint, "3:4")
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    bridge.refuse()
    nodes.wait_present(etcd.gateway, [])
    nodes.stay_undisturbed(three, 2 * TTL_S)
    bridge.heal()
    nodes.wait_present(etcd.gateway, three)
    nodes.stay_undisturbed(three, 1.5 * TTL_S)
    nodes.assert_undisturbed(three, before)
    take_in_another(nodes, three)
    nodes.finish(etcd.gateway)


@pytest.mark.parametrize("fault", ["reset", "half_open"])
def test_connections_break_while_nodes_work_and_while_they_wait(
    etcd: EtcdServer, bridge: FaultBridge, job: Job, fault: str
) -> None:
    """A broken connection, also one that nobody announced, costs neither a round nor the lease."""
    nodes = job(bridge.endpoint, "3:4", last_call_timeout=5)  # a watch must be back within it
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    getattr(bridge, fault)()
    nodes.stay_undisturbed(three, 2 * TTL_S)
    getattr(bridge, fault)()
    late = nodes.start("late", endpoint=etcd.endpoint)
    started_s = time.monotonic()
    nodes.wait_for_world([*three, *late])
    print(f"measured: {fault}: late node taken in after {time.monotonic() - started_s:.1f} s")
    changes = [len(node.all("change")) for node in three]
    assert changes == [1, 1, 1], before
    nodes.finish(etcd.gateway)


@pytest.mark.slow
def test_rounds_form_with_200_ms_latency_and_5_percent_loss(
    etcd: EtcdServer, bridge: FaultBridge, job: Job
) -> None:
    """100 ms each way. Nobody is taken for lost; a newcomer and a real loss re-form the world."""
    nodes = job(bridge.endpoint, "2:4", last_call_timeout=3)
    bridge.shape(delay_s=0.1, jitter_s=0.02, loss=0.05)
    started_s = time.monotonic()
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    print(f"measured: first world after {time.monotonic() - started_s:.1f} s")
    nodes.stay_undisturbed(three, 2 * TTL_S)
    late = nodes.start("late")
    nodes.wait_for_world([*three, *late])
    three[0].kill()
    killed_s = time.monotonic()
    nodes.wait_for_world([*three[1:], *late])
    print(f"measured: world without the killed after {time.monotonic() - killed_s:.1f} s")
    bridge.heal()
    nodes.finish(etcd.gateway)
