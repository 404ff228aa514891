"""Numbers and texts beyond what etcd's values may hold are refused where they are typed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Connection, JobSettings, Settings, Timing
from rdzv_etcd.settings.fields import MAX_HISTORY, MAX_ID, MAX_NODES, MAX_RANK_KEY
from tests.settings.tools import refused


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
