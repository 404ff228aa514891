"""Values: what is written is read; anything else is refused with the key's name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.core.model import Change, Closure, Ended, Leader, NodeInfo, Round, Slices
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.schema import values
from rdzv_etcd.settings import JobSettings

KEY = b"/rdzv_etcd/job/ctl/thing"
TEXT = st.text(max_size=20)
LEASE = st.integers(0, 2**63 - 1)
WHOLE = st.integers(0, 2**62)


@st.composite
def job_settings(draw: st.DrawFn) -> JobSettings:
    unit = draw(st.integers(1, 8))
    least = draw(st.integers(1, 1000))
    return JobSettings(least, draw(st.integers(least + unit, 3000)), unit)


NODES = st.builds(
    NodeInfo,
    st.just("host~1~x"),
    TEXT,
    st.integers(0, 65535),
    WHOLE,
    job_settings(),
    st.none() | TEXT,
    st.none() | TEXT,
    WHOLE,
)
CLOSURES = st.builds(Closure, TEXT, TEXT, st.booleans(), st.floats(0, 1e12))
ROUNDS = st.builds(
    Round,
    st.integers(1, 10**9),
    TEXT,
    st.lists(TEXT, unique=True, max_size=6).map(tuple),
    job_settings(),
    TEXT,
    st.integers(0, 65535),
    LEASE,
    WHOLE,
    st.none() | WHOLE,
    st.lists(TEXT, max_size=4).map(tuple),
    st.none() | CLOSURES,
)
LARGE_ROUNDS = st.builds(
    replace,
    ROUNDS,
    members=st.just(()),
    slices=st.builds(Slices, st.integers(1, 10**6), st.integers(1, 10**4), TEXT),
    began_as=st.none() | TEXT,
)
CHANGES = st.builds(
    Change, TEXT, WHOLE, st.lists(TEXT, max_size=5).map(tuple), st.dictionaries(TEXT, TEXT), WHOLE
)
ENDED = st.lists(st.builds(Ended, TEXT, CLOSURES, WHOLE), max_size=8).map(tuple)
LEADERS = st.builds(Leader, TEXT, job_settings())


def decode_node(key: bytes, value: bytes) -> NodeInfo:
    return values.decode_node(key, "host~1~x", value)


KINDS: list[tuple[st.SearchStrategy[Any], Callable[..., bytes], Callable[..., Any]]] = [
    (NODES, values.encode_node, decode_node),
    (ROUNDS, values.encode_round, values.decode_round),
    (LARGE_ROUNDS, values.encode_round, values.decode_round),
    (st.dictionaries(TEXT, WHOLE), values.encode_slice, values.decode_slice),
    (CHANGES, values.encode_change, values.decode_change),
    (ENDED, values.encode_ended, values.decode_ended),
    (LEADERS, values.encode_leader, values.decode_leader),
]
DECODERS = [decode for _, _, decode in KINDS]


@given(st.data())
@pytest.mark.parametrize(("strategy", "encode", "decode"), KINDS)
def test_what_is_written_is_read(
    strategy: st.SearchStrategy[Any],
    encode: Callable[..., bytes],
    decode: Callable[..., Any],
    data: st.DataObject,
) -> None:
    value = data.draw(strategy)
    assert decode(KEY, encode(value)) == value


def refused_or_read(decode: Callable[..., Any], value: bytes) -> None:
    with contextlib.suppress(StateCorruptError):  # any other error fails the test
        decode(KEY, value)


@given(st.binary(max_size=60))
@pytest.mark.parametrize("decode", DECODERS)
def test_any_bytes_are_read_or_refused(decode: Callable[..., Any], value: bytes) -> None:
    refused_or_read(decode, value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, -1, float("nan"), float("inf")])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.data())
@pytest.mark.parametrize(("strategy", "encode", "decode"), KINDS)
def test_a_value_with_one_field_spoilt_is_read_or_refused(
    strategy: st.SearchStrategy[Any],
    encode: Callable[..., bytes],
    decode: Callable[..., Any],
    data: st.DataObject,
) -> None:
    fields = json.loads(encode(data.draw(strategy)))
    inner = fields
    while True:  # spoil it somewhere, at any depth
        name = data.draw(st.sampled_from(sorted(inner)))
        if isinstance(inner[name], dict) and inner[name] and data.draw(st.booleans()):
            inner = inner[name]
            continue
        break
    if data.draw(st.booleans()):
        del inner[name]
    else:
        inner[name] = data.draw(JSON)
    refused_or_read(decode, json.dumps(fields).encode())


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\x80\x04K\x01.",  # a pickle
        b'{"v":2}',
        b'{"v":true}',
        b'{"v":1',
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"v":1e999}',
    ],
)
def test_what_others_write_is_refused(decode: Callable[..., Any], value: bytes) -> None:
    with pytest.raises(StateCorruptError, match="/rdzv_etcd/job/ctl/thing"):
        decode(KEY, value)


def test_a_newer_format_is_named() -> None:
    with pytest.raises(StateCorruptError, match="format version 2"):
        values.decode_change(KEY, b'{"v":2,"run":"r","round":1,"waiters":[],"lost":{}}')


@pytest.mark.parametrize(("strategy", "encode", "decode"), KINDS)
@given(data=st.data())
def test_unknown_fields_are_ignored(
    strategy: st.SearchStrategy[Any],
    encode: Callable[..., bytes],
    decode: Callable[..., Any],
    data: st.DataObject,
) -> None:
    value = data.draw(strategy)
    fields = json.loads(encode(value))
    fields["invented later"] = [1, {"x": None}]
    assert decode(KEY, json.dumps(fields).encode()) == value


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"members": ["a", "a"]}, "twice"),
        ({"slices": {"size": 2, "count": 1, "edition": "e"}}, "beside its 'slices'"),
        ({"slices": {"size": 0, "count": 1, "edition": "e"}}, "'size'"),
        ({"slices": {"size": 2, "count": 0, "edition": "e"}}, "'count'"),
        ({"round": 0}, "round"),
        ({"state": "open"}, "state"),
        ({"job_lease": "xyz"}, "xyz"),
        ({"job_lease": "f" * 17}, "job_lease"),
        ({"settings": {"min_nodes": 3, "max_nodes": 2, "node_unit": 1}}, "max_nodes"),
        ({"state": "closed"}, "closed"),
        (
            {
                "state": "closed",
                "closed": {"by": "a", "reason": "", "succeeded": True, "wall_s": 10**400},
            },
            "too large",
        ),
    ],
)
def test_a_spoilt_record_is_refused_and_the_field_named(
    spoil: dict[str, object], named: str
) -> None:
    record = Round(1, "run", ("a", "b"), JobSettings(1, 2), "h", 1, 7)
    fields = {**json.loads(values.encode_round(record)), **spoil}
    with pytest.raises(StateCorruptError, match=named):
        values.decode_round(KEY, json.dumps(fields).encode())
