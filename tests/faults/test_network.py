"""Faults of the network between nodes and a living etcd."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.nodes import TTL_S, Nodes, change_after
from tests.faults.test_cluster import take_in_another
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.netns import Network
from tests.support.servers import EtcdBinary, EtcdServer

Job = Callable[..., Nodes]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
    made = Network(tmp_path)
    yield made
    made.close()


def test_all_nodes_are_cut_off_and_come_back_one_by_one(etcd: EtcdServer, job: Job) -> None:
    """For several TTLs; the leader comes back first, so it sees the others missing. No restart."""
    nodes = job(etcd.endpoint, "3:4")
    with ExitStack() as stack:
        at = (etcd.host, etcd.port)
        ways = [stack.enter_context(FaultBridge(at)) for _ in range(3)]
        three = [
            nodes.start(name, endpoint=way.endpoint)[0]
            for name, way in zip("abc", ways, strict=True)
        ]
        nodes.wait_for_world(three)
        leader = nodes.leader(etcd.gateway)
        before = [len(node.entries()) for node in three]
        for way in ways:
            way.black_hole()
        nodes.wait_present(etcd.gateway, [])
        nodes.stay_undisturbed(three, 2 * TTL_S)
        pairs = sorted(zip(three, ways, strict=True), key=lambda pair: pair[0].node_id != leader)
        for _, way in pairs:
            way.heal()
            time.sleep(TTL_S / 6)  # one by one is what is tested; all within a TTL
        healed_s = time.monotonic()
        nodes.wait_present(etcd.gateway, three)
        print(f"measured: all present {time.monotonic() - healed_s:.1f} s after the last healed")
        nodes.assert_undisturbed(three, before)
        nodes.stay_undisturbed(three, 2 * TTL_S)
        take_in_another(nodes, three)
        nodes.finish(etcd.gateway)


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


@pytest.mark.parametrize("role", ["leader", "member"])
def test_a_node_is_cut_off_beyond_its_ttl(
    etcd_binary: EtcdBinary, network: Network, job: Job, tmp_path: Path, role: str
) -> None:
    """In a network namespace whose cable is pulled. The others go on without it. Cut off, it tries
    to close the round it knows: that has no effect, and it re-joins as soon as it is back."""
    host = network.add_host()
    etcd = EtcdServer(etcd_binary, tmp_path)
    etcd.host = network.gateway
    etcd.choose_ports()
    etcd.start_on_free_ports()
    try:
        nodes = job(etcd.endpoint, "2:3", last_call_timeout=30)
        far = {"enter": host.enter, "local_addr": None}
        names = ["far", "a", "b"] if role == "leader" else ["a", "b", "far"]
        three = []
        for name in names:  # the first to arrive leads and is rank 0
            three += nodes.start(name, **far if name == "far" else {})  # type: ignore[arg-type]
            nodes.wait_started(three)
            nodes.wait_present(etcd.gateway, three)
        world = nodes.wait_for_world(three)
        victim = next(node for node in three if node.name == "far")
        others = [node for node in three if node is not victim]
        assert (nodes.leader(etcd.gateway) == victim.node_id) == (role == "leader")
        assert (world.master_address == host.address) == (role == "leader")

        host.cut()
        cut_s = time.monotonic()
        two = nodes.wait_for_world(others)
        print(f"measured: {role} lost: told after {change_after(others, cut_s):.1f} s")
        assert victim.all("change") == [], "nobody can have told it"
        victim.make_close()
        nodes.wait_until("it tries to close", lambda: victim.all("closing"))
        host.heal()
        healed_s = time.monotonic()
        again = nodes.wait_for_world(three)
        print(f"measured: {role} back in a world {time.monotonic() - healed_s:.1f} s after healing")
        assert again.epoch > two.epoch > world.epoch
        assert [len(node.all("change")) for node in others] == [2, 2]
        nodes.finish(etcd.gateway)
    finally:
        etcd.kill()
