"""Which hosts mean the machine they are used on."""

from __future__ import annotations

import socket

import pytest

from rdzv_etcd.settings.hosts import is_loopback


@pytest.mark.parametrize(
    "host",
    [
        "127.1",
        "0x7f000001",
        "0177.0.0.1",
        "2130706433",
        "127.0.0.1",
        "127.8.9.10",
        "::1",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "localhost",
        "LocalHost.",
        "etcd.localhost",
        "0.0.0.0",
        "0",
        "::",
    ],
)
def test_loopback_is_what_the_resolver_takes_for_it(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.1", "::ffff:10.0.0.1", "fe80::1%lo", "no..name", "128.0.0.1"])
def test_an_address_that_others_can_reach_or_none_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_a_machines_own_name_is_not_loopback_whatever_is_in_its_hosts_file() -> None:
    """Debian maps it to 127.0.1.1, while the other machines resolve it to a real address."""
    assert not is_loopback(socket.gethostname())
