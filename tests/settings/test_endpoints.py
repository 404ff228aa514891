"""The forms of --rdzv-endpoint, and the errors for everything else."""

from __future__ import annotations

import socket

import pytest

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Endpoint, parse_endpoints
from rdzv_etcd.settings.hosts import is_loopback


@pytest.mark.parametrize(
    ("text", "scheme", "endpoints"),
    [
        ("", None, [("localhost", 2379)]),
        ("  ", None, [("localhost", 2379)]),
        ("h1", None, [("h1", 2379)]),
        ("h1:2379,h2:23790", None, [("h1", 2379), ("h2", 23790)]),
        ("h1:2379, h2:23790", None, [("h1", 2379), ("h2", 23790)]),
        ("https://h1:2379,\n  https://h2:2379\n", "https", [("h1", 2379), ("h2", 2379)]),
        ("0.0.0.0:2379", None, [("0.0.0.0", 2379)]),
        ("nonexistent-none:2379", None, [("nonexistent-none", 2379)]),
        (None, None, [("localhost", 2379)]),
        (" h1 , h2:1 ", None, [("h1", 2379), ("h2", 1)]),
        ("http://h1", "http", [("h1", 2379)]),
        ("HTTPS://h1:443/", "https", [("h1", 443)]),
        ("https://h1,h2", "https", [("h1", 2379), ("h2", 2379)]),
        ("[::1]", None, [("::1", 2379)]),
        ("[2001:DB8::0001]", None, [("2001:db8::1", 2379)]),  # gRPC compares the text
        (
            "http://[2001:db8::1]:80,[fe80::1%eth0]",
            "http",
            [("2001:db8::1", 80), ("fe80::1%eth0", 2379)],
        ),
        ("http://[fe80::1%25eth0]:1", "http", [("fe80::1%eth0", 1)]),
        ("[fe80::1%25],[fe80::1%2525]", None, [("fe80::1%25", 2379)]),
        ("10.0.0.1:1,10.0.0.1:1", None, [("10.0.0.1", 1)]),
        ("etcd-0.etcd_headless.ns.svc:2379", None, [("etcd-0.etcd_headless.ns.svc", 2379)]),
        ("bücher.example:1", None, [("xn--bcher-kva.example", 1)]),
    ],
)
def test_forms(text: str | None, scheme: str | None, endpoints: list[tuple[str, int]]) -> None:
    parsed = parse_endpoints(text)
    assert parsed.scheme == scheme
    assert parsed.endpoints == tuple(Endpoint(*endpoint) for endpoint in endpoints)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://h1,https://h2", "mixes http and https"),
        (f"{'ü' * 64}:1", "has an invalid host, 'ü"),
        ("2001:db8::1:2379", r"ambiguous: write an IPv6 address in brackets"),
        ("::1", "ambiguous"),
        ("None", r"invalid host, 'None' \(was a variable not set"),
        ("None:2379", r"invalid host, 'None' \(was a variable not set"),
        ("h1:None", r"the port must be .* \(was a variable not set"),
        ("$ETCD:2379", r"invalid host, '\$ETCD' \(a variable .* not replaced\)"),
        ("$(ETCD_HOST):2379", "not replaced"),
        ("{{ host }}:2379", "placeholder that was not replaced"),
        ("<etcd-host>:2379", "placeholder that was not replaced"),
        ("h1:$PORT", "port must be .* not replaced"),
        ("'h1:2379'", "quotes that have become part of the value"),
        ('"h1:2379"', "quotes that have become part of the value"),
        ("h1:2379 h2:2379", "separated by commas: write h1:2379,h2:2379$"),
        ("http://h1:2379 http://h2:2379", "write http://h1:2379,http://h2:2379$"),
        ("h1:2379\nh2:2379", "write h1:2379,h2:2379$"),
        ("tcp://h1:2379", "scheme must be http or https; write h1:2379$"),
        ("grpc://h1:2379/", "scheme must be http or https; write h1:2379$"),
        ("etcd://h1:2379/my-job", "scheme .* https; write h1:2379, and --rdzv-id=my-job$"),
        (
            "etcd://h1:2379/my-job?min_workers=1&max_workers=3",
            "scheme .* https; write h1:2379, and --rdzv-id=my-job$",
        ),
        ("unix:///run/etcd.sock", "scheme must be http or https; write host:port$"),
        ("h1,,h2", "empty entry"),
        ("h1,", "empty entry"),
        ("https:h1:2379", r"write https://h1:2379"),
        ("http:h1", r"write http://h1"),
        ("https:/h1:2379", r"write https://h1:2379"),
        ("h2,HTTPS//h1", r"write https://h1"),
        ("ftp://h1", "scheme must be http or https"),
        ("h1:2379/v3", "has a path"),
        ("http://h1?x=1", "has a path"),
        ("localhost:0", r"id of its own, and write localhost:2379, with --rdzv-conf=embed=1"),
        ("http://[::1]:00/", r"write http://\[::1\]:2379"),
        ("h1:65536", "port must be a number from 1 to 65535"),
        ("h1:", "port must be"),
        ("h1:etcd", "port must be"),
        ("[::1]:", "port must be"),
        (":2379", "has no host"),
        ("http://", "has no host"),
        ("h 1", "write h,1$"),
        ("[::1", r"expected \[IPv6 address\]:port"),
        ("[h1]:2379", "expected"),
        ("[::1]2379", "expected"),
        ("[fe80::1]:2379", r"needs the name.*: write \[fe80::1%eth0\]:2379"),
        ("h1:2379;h2:2379", "separated by commas: write h1:2379,h2:2379$"),
        ("h1; h2,h3;", "write h1,h2,h3$"),
        (";", "commas"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_endpoints(text)


def test_a_zone_stands_in_urls_as_they_want_it() -> None:
    """gRPC takes ``%d0`` for an escaped letter."""
    (endpoint,) = parse_endpoints("[fe80::1%d0]").endpoints
    assert endpoint.target == "[fe80::1%25d0]:2379"


def test_user_information_is_refused_without_being_repeated() -> None:
    with pytest.raises(SettingsError, match="RDZV_ETCD_PASSWORD") as caught:
        parse_endpoints("http://ann:secret@h1:2379")
    assert "secret" not in str(caught.value)


# --- which hosts mean the machine they are used on ------------------------------------------------


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
