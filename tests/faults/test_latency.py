"""A slow and lossy network, at the edge of what a TTL allows."""

from __future__ import annotations

import time

import pytest

from tests.faults.nodes import TTL_S
from tests.faults.servers import Job
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer

ONE_WAY_S = 0.2
LOSS = 0.05


@pytest.mark.slow
def test_200_ms_each_way_with_5_percent_loss_costs_neither_lease_nor_connection(
    etcd: EtcdServer, bridge: FaultBridge, job: Job
) -> None:
    """A reply that comes late because something had to be sent again is waited for: giving up the
    connection would cost all its watches, and a new one is no faster."""
    # Twelve round trips; seven are enough on a machine that is not slow itself.
    nodes = job(bridge.endpoint, "2:4", last_call_timeout=2, lease_ttl=5)
    bridge.shape(delay_s=ONE_WAY_S, jitter_s=0.02, loss=LOSS)
    started_s = time.monotonic()
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    print(f"measured: first world after {time.monotonic() - started_s:.1f} s")
    connections = bridge.connections
    nodes.stay_undisturbed(three, 8 * TTL_S)
    given_up = bridge.connections - connections
    print(f"measured: {given_up} connections given up in {8 * TTL_S} s")
    assert given_up <= 6, "it was about one a second and node when replies had to be in time"
    three[0].kill()
    killed_s = time.monotonic()
    nodes.wait_for_world(three[1:])
    print(f"measured: world without the killed after {time.monotonic() - killed_s:.1f} s")
    bridge.heal()
    nodes.finish(etcd.gateway)
