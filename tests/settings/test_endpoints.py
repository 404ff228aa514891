"""The forms of --rdzv-endpoint, and the errors for everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Endpoint, parse_endpoints


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
        (
            "http://[2001:db8::1]:80,[fe80::1%eth0]",
            "http",
            [("2001:db8::1", 80), ("fe80::1%eth0", 2379)],
        ),
        ("http://[fe80::1%25eth0]:1", "http", [("fe80::1%eth0", 1)]),
        ("[fe80::1%25],[fe80::1%2525]", None, [("fe80::1%25", 2379)]),
        ("10.0.0.1:1,10.0.0.1:1", None, [("10.0.0.1", 1)]),
        ("etcd-0.etcd_headless.ns.svc:2379", None, [("etcd-0.etcd_headless.ns.svc", 2379)]),
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


_PIECES = st.sampled_from(
    ["http://", "https://", "[", "]", "::1", ":", ",", "/", "@", "h1", "2379", " "]
)


@given(st.one_of(st.text(), st.lists(_PIECES).map("".join)))
def test_nothing_but_settings_errors_comes_out(text: str) -> None:
    try:
        parsed = parse_endpoints(text)
    except SettingsError:
        return
    assert parsed.endpoints
    again = parse_endpoints(",".join(endpoint.target for endpoint in parsed.endpoints))
    assert again.endpoints == parsed.endpoints
