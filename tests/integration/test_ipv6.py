"""A world whose containers have IPv6 addresses only."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest

from tests.integration.containers import FOLDER, Host, Project


@pytest.fixture(scope="module")
def ipv6(project: Callable[..., Project]) -> Project:
    """One etcd and two nodes, none of which has an IPv4 address."""
    try:
        started = project(
            "etcd-single",
            profiles=["single"],
            override="docker-compose.ipv6.yml",
            ETCD_LISTEN="[::]",
        )
    except AssertionError as error:
        if "ipv6" in str(error).lower():
            pytest.skip(f"the engine offers no network with IPv6: {error}")
        raise
    return started


def test_a_world_over_ipv6(ipv6: Project, node_image: str) -> None:
    (etcd,) = ipv6.hosts("etcd-single")
    drop_ipv4(etcd, node_image)
    ipv6.compose("up", "--detach", "--no-build", "node-single")
    nodes = ipv6.hosts("node-single")
    world = ipv6.wait_for_world(nodes)
    address = ipaddress.ip_address(world[0].master_addr)
    assert address.version == 6
    assert not address.is_loopback
    assert sum(str(address) in node.addresses for node in nodes) == 1
    for node in nodes:
        probe = "import socket; socket.socket(socket.AF_INET).connect(('192.0.2.1', 9))"
        tried = node.attempt("python3", "-c", probe)
        assert tried.returncode != 0
        assert "unreachable" in tried.stdout
    ipv6.expect_undisturbed(nodes, 3)


def drop_ipv4(host: Host, image: str) -> None:
    """Take a container's IPv4 address away from outside: etcd's image has no shell."""
    host.container.client.containers.run(
        image,
        command=["python3", "/integration/no_ipv4.py"],
        volumes=[f"{FOLDER}:/integration:ro"],
        network_mode=f"container:{host.container.id}",
        user="0:0",
        cap_add=["NET_ADMIN"],
        remove=True,
    )
