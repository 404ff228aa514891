"""A world across containers: its address, and host names."""

from __future__ import annotations

import ipaddress

from tests.integration.containers import Host, Project


def test_master_address_is_reachable_from_everywhere_and_nobodys_loopback(
    job: Project, pair: list[Host]
) -> None:
    first, second = job.wait_for_world(pair)
    address = ipaddress.ip_address(first.master_addr)
    assert not address.is_loopback
    assert first.master_addr == second.master_addr
    assert sum(first.master_addr in host.addresses for host in pair) == 1
    for host in pair:
        probe = (
            f"import socket; socket.create_connection({(first.master_addr, first.master_port)}, 10)"
        )
        host.run("python3", "-c", probe)


def test_host_names_are_of_no_use_to_others(job: Project, pair: list[Host]) -> None:
    """Every node has the same host name, and resolves it to itself."""
    look_up = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))"
    seen = [host.run("python3", "-c", look_up).split() for host in pair]
    assert [name for name, _ in seen] == ["same-everywhere"] * 2
    for host, (_, address) in zip(pair, seen, strict=True):
        assert address in host.addresses
    job.expect_undisturbed(pair, 3)
