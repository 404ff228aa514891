"""Every option by every name, and every contradiction with the names the user typed."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from ipaddress import ip_address
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import (
    OPTIONS,
    AfterEnd,
    Connection,
    JobSettings,
    Settings,
    Timing,
    Tls,
    options_table,
)
from rdzv_etcd.settings.fields import (
    MAX_HISTORY,
    MAX_ID,
    MAX_NODES,
    MAX_RANK_KEY,
    WHOLE_DOMAIN,
)
from rdzv_etcd.settings.options import NAMES
from tests.settings.tools import refused, settings


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    path = tmp_path / "some.pem"
    path.write_text("PEM")
    return path


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ("", "timing.join_timeout_s", 600),
        ("timeout=900", "timing.join_timeout_s", 900),
        ("timeout=900,join_timeout=60", "timing.join_timeout_s", 60),
        ("join_timeout=60,timeout=900", "timing.join_timeout_s", 60),
        ("timeout=900", "timing.last_call_timeout_s", 30),
        ("last_call_timeout=5", "timing.last_call_timeout_s", 5),
        ("join_timeout=5", "timing.last_call_timeout_s", 5),
        ("join_timeout=5", "connection.connect_timeout_s", 5),
        ("connect_timeout=2", "connection.connect_timeout_s", 2),
        ("read_timeout=7", "connection.request_timeout_s", 7),
        ("close_timeout=20", "timing.close_timeout_s", 20),
        ("lease_ttl=5", "timing.lease_ttl_s", 5),
        ("keep_alive_interval=4,keep_alive_max_attempt=3", "timing.lease_ttl_s", 12),
        ("keep_alive_interval=5,lease_ttl=15", "timing.lease_ttl_s", 15),
        ("job_lease_ttl=90", "timing.job_ttl_s", 90),
        ("settle=0", "timing.settle_s", 0),
        ("closed_ttl=7", "timing.closed_ttl_s", 7),
        ("", "timing.ended_ttl_s", 86400),
        ("ended_ttl=5", "timing.ended_ttl_s", 5),
        ("", "after_end", AfterEnd.NEW_RUN),
        ("after_end=finish", "after_end", AfterEnd.FINISH),
        ("node_unit=2", "job.node_unit", 2),
        ("segment_size=1", "job.segment_size", 1),
        ("segment_size=all,domain_key=r7", "job.segment_size", WHOLE_DOMAIN),
        ("segment_size=all,domain_key=r7", "domain_key", "r7"),
        ("", "embed", False),
        ("embed=1", "embed", True),
        ("embed=no", "embed", False),
        ("embed_grace=3", "embed_grace_s", 3),
        ("", "prefix", "/rdzv_etcd"),
        ("etcd_prefix=/torchelastic/p2p", "prefix", "/torchelastic/p2p"),
        ("prefix=mine/", "prefix", "/mine"),
        ("", "rank_key", None),
        ("rank_key=rack-3", "rank_key", "rack-3"),
        ("", "local_addr", None),
        ("", "connection.tls", None),
        ("", "connection.credentials", None),
    ],
)
def test_every_name_sets_its_value(config: str, name: str, value: object) -> None:
    given: dict[str, Any] = dict(part.split("=") for part in config.split(",") if part)
    assert attrgetter(name)(settings(**given)) == value


@pytest.mark.parametrize("names", ["cacert cert key", "ca_cert ssl_cert ssl_cert_key"])
@pytest.mark.parametrize("type_", [str, Path])
def test_tls_by_either_backends_names(pem: Path, names: str, type_: type) -> None:
    files: dict[str, Any] = dict.fromkeys(names.split(), type_(pem))
    for made in (settings(protocol="https", **files), settings(endpoint="https://h1", **files)):
        assert made.connection.tls == Tls(pem, pem, pem)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", str(2**53 + 1), "9" * 5000, "²"])
def test_an_epoch_that_is_handed_back_must_be_one(text: str) -> None:
    assert settings(environ={"RDZV_ETCD_EPOCH": "1700000000000000"}).epoch_floor == 17 * 10**14
    assert settings(environ={"RDZV_ETCD_EPOCH": ""}).epoch_floor == 0
    refused("RDZV_ETCD_EPOCH", environ={"RDZV_ETCD_EPOCH": text})


def test_values_may_be_what_they_mean() -> None:
    made = settings(lease_ttl=5, settle=0.5, embed=True, node_unit=2, join_timeout=None, rank_key=7)
    assert (made.timing.lease_ttl_s, made.timing.settle_s, made.embed) == (5, 0.5, True)
    assert made.timing.join_timeout_s == 600
    assert made.rank_key == "7"
    assert settings(embed=0).embed is False


class Whole:
    """A whole number of a type of its own, as numpy has several."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


class Several:
    """As an array is: no single answer to whether it equals a number."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "several([1, 1])"


def test_a_whole_number_may_be_of_any_type_that_is_one() -> None:
    job = settings(nodes=(Whole(1), Whole(4)), node_unit=Whole(2)).job
    assert job == JobSettings(1, 4, 2)
    assert {type(number) for number in (job.min_nodes, job.max_nodes, job.node_unit)} == {int}
    assert JobSettings(Whole(1), 2) == JobSettings(1, 2)  # type: ignore[arg-type]
    made = settings(lease_ttl=Whole(5), settle=Whole(0), rank_key=Whole(7), history=Whole(3))
    assert (made.timing.lease_ttl_s, made.timing.settle_s, made.rank_key) == (5, 0.0, "7")
    assert type(made.timing.lease_ttl_s) is int
    assert made.history == 3
    assert settings(join_timeout=Fraction(5, 2)).timing.join_timeout_s == 2.5


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("1", r"'1' \(str\)"),
        (1.0, r"1\.0 \(float\)"),
        (True, r"True \(bool\)"),
        (None, r"None \(NoneType\)"),
        ([1], r"\[1\] \(list\)"),
        (Several(), r"several\(\[1, 1\]\) \(Several\)"),
    ],
    ids=["text", "float", "bool", "none", "list", "several"],
)
def test_what_is_no_number_of_nodes_is_shown_with_its_type(number: object, shown: str) -> None:
    refused(rf"^min_nodes \(--nnodes\) is {shown}; it must be a wh", nodes=(number, 4))
    refused(rf"^max_nodes \(--nnodes\) is {shown}; it must be a wh", nodes=(1, number))


@pytest.mark.parametrize("name", ["lease_ttl", "timeout", "history", "embed", "rank_key", "cacert"])
def test_a_value_of_a_type_that_no_option_takes_is_shown_with_it(name: str) -> None:
    assert "=[7] (list) must be " in refused(name, **{name: [7]})
    assert "=several([1, 1]) (Several) must be " in refused(name, **{name: Several()})


def test_no_endpoint_is_this_machine_and_anything_but_text_is_refused() -> None:
    assert settings(endpoint=None).connection == settings(endpoint="").connection
    for endpoint, shown in ((b"h1", r"b'h1' \(bytes\)"), (2379, r"2379 \(int\)"), (["h1"], "list")):
        refused(f"^--rdzv-endpoint is .*{shown}.*; it must be text", endpoint=endpoint)


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    assert "'last_call_timeout'" in refused("unknown", last_call_timout="3")
    assert "'lease_ttl'" in refused("unknown", Lease_TTL="3")
    assert "known are" in refused("unknown", zzzzqqqq="3")


def test_contradictions_name_what_was_typed(pem: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("PEM")
    refused("cacert=.*some.pem and ca_cert=.*other.pem", cacert=pem, ca_cert=other)
    assert settings(protocol="https", cacert=pem, ca_cert=pem).connection.tls == Tls(pem)
    refused("ssl_cert_key given without its certificate", protocol="https", ssl_cert_key=pem)
    refused("ssl_cert given, but the connection is plain http", ssl_cert=pem)
    refused("protocol=http contradicts https://", endpoint="https://h1", protocol="http")
    refused("TLS takes no host name with a dot.*: write h1.a", endpoint="https://h2,h1.a.:1")
    refused("protocol='ftp' must be one of http, https", protocol="ftp")
    refused("lease_ttl is 1 s; etcd's shortest", lease_ttl="1")
    refused("keep_alive_interval × keep_alive_max_attempt is 1 s", keep_alive_interval="0.2")
    refused("lease_ttl=10 contradicts", lease_ttl="10", keep_alive_interval="5")
    refused("last_call_timeout=20 is longer than timeout=10", last_call_timeout=20, timeout=10)
    refused("job_lease_ttl=5 is shorter", job_lease_ttl=5)
    refused(r"--rdzv-endpoint 'h1:x'", endpoint="h1:x")
    refused("node_unit", node_unit=5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lease_ttl": "abc"}, "lease_ttl='abc' must be a positive whole number of seconds"),
        ({"lease_ttl": "2.5"}, "lease_ttl='2.5' must be a positive whole number of seconds"),
        ({"lease_ttl": True}, "must be a positive whole number"),
        ({"timeout": "-1"}, "timeout='-1' must be a positive number of seconds"),
        ({"timeout": "inf"}, "must be a positive"),
        ({"timeout": 1e300}, "at most ten years"),
        ({"peer_silence": "-0.1"}, "peer_silence='-0.1' must be a number of seconds, zero or more"),
        ({"node_unit": "0"}, "node_unit='0' must be a whole number from 1 to 1000000"),
        ({"embed": "maybe"}, "embed='maybe' must be 0 or 1"),
        ({"embed": 2}, "must be 0 or 1"),
        ({"after_end": "begin"}, "new-run, finish"),
        ({"etcd_prefix": " "}, "etcd_prefix is empty"),
        ({"etcd_prefix": "//"}, "etcd_prefix='//' would mix"),
        ({"etcd_prefix": "a\nb"}, "unprintable"),
        ({"cacert": "/no/such/file"}, "cacert='/no/such/file' cannot be read: No such file"),
        ({"cacert": "/"}, "cannot be read: Is a directory"),
        ({"protocol": 7.5}, "must be text"),
    ],
)
def test_malformed_values(config: dict[str, Any], message: str) -> None:
    refused(message, **config)


def test_rank_keys_mean_what_their_form_says() -> None:
    environ = {"SLURM_PROCID": "3", "node7": "wrong", "EMPTY": ""}
    assert settings(environ=environ, rank_key="SLURM_PROCID").rank_key == "3"
    assert settings(environ=environ, rank_key="env:SLURM_PROCID").rank_key == "3"
    assert settings(environ=environ, rank_key="node7").rank_key == "node7"
    assert settings(environ=environ, rank_key="env:node7").rank_key == "wrong"
    assert settings(environ=environ, rank_key="value:SLURM_PROCID").rank_key == "SLURM_PROCID"
    assert settings(environ=environ, rank_key="7").rank_key == "7"
    refused("'JOB_INDEX', which is not set.*write rank_key=value:JOB_INDEX", rank_key="JOB_INDEX")
    refused("variable 'low', which is not set$", rank_key="env:low")
    refused("which is not set", environ=environ, rank_key="EMPTY")
    refused("nothing behind", rank_key="value:")


def test_segments_and_their_domains_must_fit() -> None:
    environ = {"RACK": "r7"}
    made = settings(nodes=(4, 8), segment_size="4", domain_key="env:RACK", environ=environ)
    assert (made.job.segment_size, made.domain_key) == (4, "r7")
    assert str(made.job) == "min_nodes=4, max_nodes=8, segment_size=4"
    whole = settings(nodes=(3, 5), segment_size="all", domain_key=7)
    assert str(whole.job) == "min_nodes=3, max_nodes=5, segment_size=all"
    refused("domain_key=env:RACK names .*'RACK', which is not set", domain_key="env:RACK")
    refused("segment_size=4 needs domain_key", nodes=(4, 8), segment_size=4)
    refused("segment_size=all needs domain_key", segment_size="all")
    refused("domain_key needs segment_size", domain_key="r7")
    fits: dict[str, Any] = {"domain_key": "r7", "segment_size": 4}
    refused(r"min_nodes \(--nnodes\) is 6, .*nearest that fit are 4 and 8", nodes=(6, 8), **fits)
    refused(r"max_nodes \(--nnodes\) is 9, .*nearest that fit are 8 and 12", nodes=(4, 9), **fits)
    refused("min_nodes.* is 2, .*nearest that fit are 4$", nodes=(2, 8), **fits)
    refused("node_unit=2 and segment_size=4 exclude", nodes=(4, 8), node_unit=2, **fits)
    refused("segment_size='0' must be .*, or all", domain_key="r7", segment_size="0")
    refused("segment_size='rack' must be .*, or all", domain_key="r7", segment_size="rack")
    refused("domain_key has 256 characters", domain_key="r" * 256, segment_size="all")
    refused("must be printable", domain_key="a\nb", segment_size="all")


def test_the_job_id_and_address_must_be_text() -> None:
    not_text = ip_address("::1")
    refused("job id", job_id="")
    refused("not valid UTF-8", job_id="a\udc80")
    refused(r"the job id .* is .*\(IPv6Address\); it must be text", job_id=not_text)
    refused("--local-addr", local_addr="a b")
    refused(r"--local-addr is .*\(IPv6Address\).* give it as text", local_addr=not_text)
    refused("max_nodes", nodes=(2, 1))
    made = settings(job_id="a/b ü", local_addr="fe80::1%eth0")
    assert (made.job_id, made.local_addr) == ("a/b ü", "fe80::1%eth0")
    assert settings(local_addr="[::1]").local_addr == "::1"  # as an endpoint is written


def test_every_option_is_in_the_table_but_those_that_only_tests_change() -> None:
    table = options_table()
    public = {name for option in OPTIONS for name in option.names}
    assert all(f"`{name}`" in table for name in public)
    assert len(table.splitlines()) == len(OPTIONS) + 2
    hidden = NAMES.keys() - public
    assert hidden == {"settle", "closed_ttl", "job_lease_ttl", "slice_nodes", "embed_grace"}
    assert not any(f"`{name}`" in table for name in hidden)
    known = refused("known are", zzzzqqqq="3")
    assert "closed_ttl" not in known
    assert "'closed_ttl'" not in refused("unknown", closed_tll="3")


@pytest.mark.parametrize(
    ("nodes", "unit", "has_a_last_call"),
    [((4, 4), 1, False), ((3, 4), 2, False), ((3, 4), 1, True), ((2, 4), 2, True)],
)
def test_a_long_last_call_is_refused_only_where_there_is_one(
    nodes: tuple[int, int], unit: int, has_a_last_call: bool
) -> None:
    """A world of one possible size is formed when its last node is there."""

    given: dict[str, Any] = {"last_call_timeout": 20, "timeout": 10, "node_unit": unit}
    if has_a_last_call:
        refused("last_call_timeout=20 is longer", nodes=nodes, **given)
    else:
        assert settings(nodes=nodes, **given).timing.last_call_timeout_s == 10


@pytest.mark.parametrize(
    "option", [{"is_host": "1"}, {"store_type": "tcp"}, {"heartbeat_timeout": "2"}]
)
def test_options_of_c10d_that_mean_nothing_here_are_accepted(option: dict[str, Any]) -> None:
    assert settings(**option) == settings()


# --- numbers and texts beyond what etcd's values may hold are refused where they are typed --------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: JobSettings(1, 10**30), r"--nnodes.*10{30}.*1000000"),
        (lambda: JobSettings(1, MAX_NODES + 1), r"--nnodes.*1000001.*1000000"),
        (lambda: JobSettings(10**5000, 10**5000), r"--nnodes.*16610 bits.*1000000"),
        (lambda: JobSettings(10**5000, 1), r"min_nodes \(--nnodes\).*1000000"),
        (lambda: JobSettings(-(10**5000), 1), "min_nodes.*from 1 to"),
        (lambda: JobSettings(1, -(10**5000)), "max_nodes.*from 1 to"),
        (lambda: JobSettings(1, 4, 10**5000), "node_unit.*1000000"),
    ],
    ids=["30 digits", "one more", "5000 digits", "least", "negative", "negative most", "unit"],
)
def test_numbers_of_nodes(make: Callable[[], object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make()


@pytest.mark.parametrize(
    "seconds",
    [10**400, 10**5000, -(10**5000), math.inf, math.nan, 0, -1],
    ids=["400 digits", "5000 digits", "negative and long", "infinite", "nan", "zero", "negative"],
)
def test_seconds_given_in_code(seconds: float) -> None:
    with pytest.raises(SettingsError, match=r"lease_ttl_s is .*; it must be a positive whole numb"):
        Timing(lease_ttl_s=seconds)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"request_timeout_s is .*at most ten years"):
        Connection(request_timeout_s=seconds)


def test_a_million_nodes_may_be_asked_for() -> None:
    assert JobSettings(1, MAX_NODES).max_nodes == 1_000_000


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"job_id": "x" * (MAX_ID + 1)}, "--rdzv-id.*1001.*1000"),
        ({"prefix": "/" + "x" * MAX_ID}, "etcd_prefix.*1001.*1000"),
        ({"rank_key": "9" * 5000}, "rank_key.*5000.*1000"),
        ({"local_addr": "x" * 256}, "--local-addr.*256.*255"),
        ({"history": str(MAX_HISTORY + 1)}, "history='1001' must be .*from 0 to 1000"),
        ({"history": "-1"}, "history='-1' must be a whole number from 0"),
        ({"history": "all"}, "history='all' must be a whole number"),
    ],
    ids=["id", "prefix", "rank key", "address", "history", "negative history", "no number"],
)
def test_texts(given: dict[str, object], named: str) -> None:
    refused(named, **given)


def test_the_longest_ones_are_accepted() -> None:
    made = Settings("x" * MAX_ID, JobSettings(1, 2), rank_key="9" * MAX_RANK_KEY)
    assert len(made.job_id) == MAX_ID
