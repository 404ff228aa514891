"""A host that falls silent is told by the links between nodes, long before a lease ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rdzv_etcd.world_change import HOST_SILENT
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.netns import Network
from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agents, Job

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_CONF = "last_call_timeout=5,closed_ttl=3,ended_ttl=3"
_TTL_S = 20
"""That a host is silent is believed by who has been there for a TTL itself."""


def test_a_host_that_falls_silent_is_told_though_its_lease_lives(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Its cable is pulled, and all its processes are stopped: nobody says a word."""
    if why_not := netns.why_not():
        pytest.skip(why_not)
    network = Network(tmp_path, joined=True)
    with FaultBridge((etcd.host, etcd.port), host=network.gateway) as bridge:
        try:
            hosts = [network.add_host() for _ in range(3)]
            alive = [
                agents.start(
                    Job(
                        bridge.target,
                        tmp_path,
                        nnodes="2:3",
                        conf=f"{_CONF},lease_ttl={_TTL_S}",
                        run_id=f"silent-{tmp_path.name}",
                        enter=host.enter,
                    ),
                    f"node{number}",
                    GLOO_SOCKET_IFNAME="eth0",
                )[0]
                for number, host in enumerate(hosts)
            ]
            agents.wait_for_world(alive, size=3)
            trusted_at = time.time() + _TTL_S
            agents.wait_until(
                "a TTL of training", lambda: all(agent.steps_after(trusted_at) for agent in alive)
            )
            silent_at = time.time()
            hosts[0].cut()
            alive[0].freeze()
            agents.wait_for_world(alive[1:], size=2, after=silent_at)
            for survivor in alive[1:]:  # a lease that ends is told as "lease expired"
                assert f": {HOST_SILENT}" in survivor.output
        finally:
            agents.close()
            network.close()
