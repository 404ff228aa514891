"""The listening socket and the address a node offers for the round's store."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket

import pytest
from torch._C._distributed_c10d import TCPStore

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.runtime.listener import (
    bind_listener,
    check_local_addr,
    loopback_problem,
    still_found,
)
from rdzv_etcd.settings.connection import Endpoint
from rdzv_etcd.torch_plugin.store import serve_tcp_store

LOCAL = (Endpoint("127.0.0.1"),)


def source_towards(family: socket.AddressFamily, beyond: str) -> str | None:
    """Return what the kernel says about the default route of this machine."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((beyond, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_it_listens_at_the_address_it_names_and_gives_the_port_back() -> None:
    listener = bind_listener(check_local_addr("127.0.0.1"), LOCAL)
    assert listener.address == "127.0.0.1"
    with socket.create_connection((listener.address, listener.port), timeout=10):
        pass
    assert not os.get_inheritable(listener.socket.fileno())
    listener.close()
    listener.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", listener.port))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_one_socket_serves_both_families_if_no_address_was_given() -> None:
    listener = bind_listener(None, LOCAL)
    for address in ("127.0.0.1", "::1"):
        try:
            connection = socket.create_connection((address, listener.port), timeout=10)
        except OSError:
            assert address == "::1"  # IPv6 sockets, but no IPv6 loopback address
        else:
            connection.close()
    listener.close()


@pytest.mark.parametrize("local_addr", ["127.0.0.1", "localhost"])
def test_it_listens_only_at_the_address_that_was_given(local_addr: str) -> None:
    listener = bind_listener(check_local_addr(local_addr), LOCAL)
    with socket.create_connection((local_addr, listener.port), timeout=10):
        pass
    other = source_towards(socket.AF_INET, "192.0.2.1") or "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, listener.port), timeout=10)
    assert listener.own_address == "127.0.0.1"
    listener.close()


def test_its_tcp_store_is_served_there_only() -> None:
    listener = bind_listener(check_local_addr("127.0.0.2"), LOCAL)
    store = serve_tcp_store(listener)
    store.set("key", "value")
    client = TCPStore("127.0.0.2", listener.port, is_master=False)
    assert client.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=10)


def test_a_loopback_address_is_a_problem_if_etcd_is_not_on_this_host() -> None:
    beyond = Endpoint("198.51.100.7")
    source = source_towards(socket.AF_INET, beyond.host)
    if source is None:
        pytest.skip("no IPv4 route off this host")
    listener = bind_listener(check_local_addr("127.0.0.1"), LOCAL)
    assert loopback_problem(listener, LOCAL) is None
    problem = loopback_problem(listener, (*LOCAL, beyond))
    assert problem is not None
    for words in ("127.0.0.1", source, "198.51.100.7:2379", "--local-addr"):
        assert words in problem
    listener.close()


def test_the_address_is_the_default_routes_if_etcd_is_on_this_host() -> None:
    """etcd as a sidecar on localhost says nothing about where other hosts find us."""
    expected = source_towards(socket.AF_INET, "192.0.2.1") or source_towards(
        socket.AF_INET6, "2001:db8::1"
    )
    listener = bind_listener(None, LOCAL)
    listener.close()
    assert listener.address == (expected or "127.0.0.1")


def test_an_address_that_was_found_is_kept_while_this_host_has_it() -> None:
    found = bind_listener(None, LOCAL)
    kept = still_found(found.address)
    again = bind_listener(kept, [Endpoint("no-such-host.invalid")])
    assert again.address == found.address
    assert again.socket.getsockname()[0] == found.socket.getsockname()[0], "on all interfaces"
    for listener in (found, again):
        listener.close()
    assert still_found("198.51.100.7") is None


def test_an_endpoint_elsewhere_decides_before_one_on_this_host() -> None:
    expected = source_towards(socket.AF_INET, "198.51.100.7")
    if expected is None:
        pytest.skip("no IPv4 route off this host")
    listener = bind_listener(None, (Endpoint("localhost"), Endpoint("198.51.100.7")))
    listener.close()
    assert listener.address == expected


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "a" * 70])
def test_an_endpoint_whose_name_cannot_be_resolved_is_left_to_the_client_to_report(
    name: str,
) -> None:
    listener = bind_listener(None, [Endpoint(name)])
    listener.close()
    assert not ipaddress.ip_address(listener.address).is_unspecified


@pytest.mark.parametrize(
    ("local_addr", "reason"),
    [
        ("", "bare host name"),
        ("  ", "bare host name"),
        ("127.0.0.1:29500", "bare host name"),
        ("http://localhost", "bare host name"),
        ("0.0.0.0", "no node can connect"),
        ("::", "no node can connect"),
        ("224.0.0.1", "no node can connect"),
        ("fe80::1", "without a scope"),
        ("no-such-host.invalid", "cannot resolve"),
        ("no..name", "cannot resolve"),
        ("10.0.0.256", "cannot resolve"),
    ],
)
def test_a_local_addr_that_cannot_be_one_is_refused(local_addr: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        check_local_addr(local_addr)
    assert repr(local_addr) in str(caught.value)


def test_a_local_addr_behind_address_translation_is_used_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        listener = bind_listener(check_local_addr("203.0.113.9"), LOCAL)
    listener.close()
    assert listener.address == "203.0.113.9"
    assert "not an address of this host" in caplog.text


def test_a_name_is_published_as_a_name(caplog: pytest.LogCaptureFixture) -> None:
    listener = bind_listener(check_local_addr("localhost"), LOCAL)
    listener.close()
    assert listener.address == "localhost"
    assert caplog.records == []


def test_detaching_leaves_the_descriptor_to_the_caller() -> None:
    listener = bind_listener(check_local_addr("127.0.0.1"), LOCAL)
    descriptor = listener.detach()
    listener.close()
    os.fstat(descriptor)  # still open
    with pytest.raises(ValueError, match="handed over"):
        listener.detach()
    os.close(descriptor)
