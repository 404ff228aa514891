"""Values: they are written as ever, and anything else is refused with the key's name.

``tests/fuzz`` gives every decoder changed and random input, and writes again whatever was read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.errors import StateCorruptError, StateVersionError, UnwritableValueError
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.codec import decode_key
from rdzv_etcd.protocol.fields import MAX_EPOCH, MAX_NAME, MAX_TEXT
from rdzv_etcd.protocol.model import (
    Change,
    Closure,
    Control,
    Drain,
    Ended,
    NodeInfo,
    Round,
    Slices,
    Ttls,
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_EPOCH_CLAIM, MAX_ROUND
from tests.protocol.golden import KEY, READ, WRITTEN

REVISION = 2**60
"""More than any etcd reaches."""


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_value_is_written_as_ever_and_read(kind: str) -> None:
    encode, decode, value, text = WRITTEN[kind]
    assert encode(value).decode() == text
    assert decode(KEY, text.encode()) == value
    newer = {**json.loads(text), "invented later": [1, {"x": None}]}
    assert decode(KEY, json.dumps(newer).encode()) == value


@pytest.mark.parametrize("kind", READ)
def test_a_value_of_the_build_before_is_read(kind: str) -> None:
    decode, value, text = READ[kind]
    assert decode(KEY, text.encode()) == value


def nested(levels: int) -> list[object]:
    """Lists in each other."""
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def decode_node(key: bytes, value: bytes) -> NodeInfo:
    place = values.decode_place(key, "host~1~x", value)
    assert isinstance(place, NodeInfo)
    return place


@pytest.mark.parametrize("kind", WRITTEN)
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
        b'{"v":NaN}',
        b'{"v":1,"v":1}',
        b'{"v":1,"a":' + b"9" * 5000 + b"}",
        b'{"v":1,"a":' + b'{"a":' * 100_000,
    ],
)
def test_a_foreign_value_is_refused(kind: str, value: bytes) -> None:
    _, decode, _, _ = WRITTEN[kind]
    with pytest.raises(StateCorruptError, match="/rdzv_etcd/job/ctl/thing"):
        decode(KEY, value)


def test_another_format_is_named_and_nothing_is_to_be_deleted() -> None:
    """A job of another version may be using it."""
    value = b'{"v":2,"run":"r","round":1,"waiters":[],"lost":{}}'
    kv = KeyValue(KEY, value, 1, 3, 2, lease_id=7)
    with pytest.raises(StateVersionError, match=r"version 2.*written at revision 3") as caught:
        decode_key(values.decode_change, kv)
    assert "one version of rdzv-etcd" in str(caught.value)
    assert "elete" not in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"members": ["a", "a"]}, "twice"),
        ({"members": ["a", "b", "c"]}, "3 members"),
        ({"slices": {"size": 2, "count": 1, "edition": "e"}}, "has 'slices' as well"),
        ({"slices": {"size": 0, "count": 1, "edition": "e"}, "members": []}, "'size'"),
        ({"slices": {"size": 2, "count": 0, "edition": "e"}, "members": []}, "'count'"),
        ({"slices": {"size": 2, "count": 3, "edition": "e"}, "members": []}, "'count'"),
        ({"slices": {"size": 3, "count": 1, "edition": "e"}, "members": []}, "3 members"),
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
        (
            {
                "state": "closed",
                "closed": {"by": "a", "reason": "", "succeeded": True, "wall_s": math.nan},
            },
            "NaN",
        ),
        ({"round": MAX_ROUND + 1}, "'round'"),
        ({"slices": {"size": 10**9, "count": 1, "edition": "e"}, "members": []}, "'size'"),
        ({"slices": {"size": 2, "count": 10**9, "edition": "e"}, "members": []}, "'count'"),
        ({"master": {"address": "h", "port": 65536}}, "'port'"),
        ({"master": {"address": "h", "port": 0}}, "'port'"),
        ({"master": {"address": "h x", "port": 1}}, "'address'"),
        ({"master": {"address": "", "port": 1}}, "'address'"),
        ({"epoch_base": MAX_EPOCH + 1}, "'epoch_base'"),
        ({"epoch": MAX_EPOCH + 1}, "'epoch'"),
        ({"job_lease": "-1"}, "job_lease"),
        ({"members": ["a", "b\ud800"]}, "'members'"),
        ({"members": ["a\x1b[2J"]}, "'members'"),
        ({"members": ["a" * (MAX_NAME + 1)]}, "'members'"),
        ({"run": ""}, "'run'"),
        ({"settings": {"min_nodes": 1, "max_nodes": 10**30, "node_unit": 1}}, "max_nodes"),
    ],
)
def test_a_spoilt_record_is_refused_and_the_field_named(
    spoil: dict[str, object], named: str
) -> None:
    record = Round(1, "run", ("a", "b"), JobSettings(1, 2), "h", 1, 7)
    fields = {**json.loads(values.encode_round(record)), **spoil}
    with pytest.raises(StateCorruptError, match=named):
        values.decode_round(KEY, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": 0}, "'port'"),
        ({"port": 65536}, "'port'"),
        ({"address": ""}, "'address'"),
        ({"address": "a" * (MAX_NAME + 1)}, "'address'"),
        ({"address": "host\nname"}, "'address'"),
        ({"arrived_for": 2 * MAX_ROUND + 1}, "'arrived_for'"),
        ({"rank_key": "9" * 5000}, "'rank_key'"),
        ({"rank_key": "\ud800"}, "surrogates"),
        ({"data": {"a": nested(32)}}, "'data' has lists .* more than 32 deep"),
        ({"data": {"a": nested(900)}}, "'data' has lists .* more than 32 deep"),
        ({"leaving": "x" * (MAX_TEXT + 1)}, "'leaving'"),
        ({"node_id": "a\ud800"}, "id"),
        ({"node_id": "nobody~3"}, "not known"),
        ({"node_id": ""}, "id"),
        ({"port": 10**5000}, "port|digits"),
        ({"epoch_seen": True}, "'epoch_seen'"),
        ({"clock_us": 1.5}, "'clock_us'"),
    ],
)
def test_a_presence_that_others_could_not_read_is_not_written(
    change: dict[str, Any], named: str
) -> None:
    info = replace(NodeInfo("a~1~x", "host", 1, 1, JobSettings(1, 2)), **change)
    with pytest.raises(UnwritableValueError, match=named):
        values.encode_node(info)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": MAX_ROUND + 1},
        {"epoch_base": 2**63},
        {"master_port": 0},
        {"members": ("a", "a")},
        {"members": ("a", "b", "c")},
        {"slices": Slices(3, 1, "e"), "members": ()},
        {"slices": Slices(2, 3, "e"), "members": ()},
        {"slices": Slices(10**9, 1, "e"), "members": ()},
        {"slices": Slices(2, 1, "e")},
        {"job_lease": -1},
        {"closure": Closure("a", "done", True, math.nan)},
        {"closure": Closure("a", "x" * (MAX_TEXT + 1), True, 1.0)},
        {"lease_ttls_s": Ttls(2, 1)},
        {"lease_ttls_s": Ttls(0, 1)},
    ],
)
def test_a_record_that_others_could_not_read_is_not_written(change: dict[str, Any]) -> None:
    record = replace(Round(1, "run", ("a", "b"), JobSettings(1, 2), "h", 1, 7), **change)
    with pytest.raises(UnwritableValueError):
        values.encode_round(record)


def highest(decode: Callable[[bytes, bytes], Any], value: bytes, field: str) -> Any:
    """What is read of a value whose field is as high as it may be."""
    fields = json.loads(value)
    lowest, above = fields.get(field, 1), 2**63
    while above - lowest > 1:
        fields[field] = (lowest + above) // 2
        try:
            decode(KEY, json.dumps(fields).encode())
        except StateCorruptError:
            above = fields[field]
        else:
            lowest = fields[field]
    return decode(KEY, json.dumps({**fields, field: lowest}).encode())


@pytest.mark.parametrize("field", ["round", "epoch_base", "epoch"])
def test_after_any_record_that_is_read_the_next_steps_can_be_written(field: str) -> None:
    """Otherwise no node could form a world any more."""
    whole = Round(1, "run", ("a", "b"), JobSettings(1, 2), "h", 1, 7)
    record = highest(values.decode_round, values.encode_round(whole), field)
    control = Control(REVISION, record, REVISION)
    arriving = NodeInfo("a", "h", 1, control.next_number, record.settings)
    assert values.decode_place(KEY, "a", values.encode_node(arriving)) == arriving
    change = Change(record.run, record.number, ("a",))
    assert values.decode_change(KEY, values.encode_change(change)) == change
    drain = Drain("a", "maintenance", control.epoch)
    assert values.decode_drain(KEY, values.encode_drain(drain)) == drain
    closure = Closure("a", "done", True, 1.0)
    values.encode_round(replace(record, closure=closure))
    values.encode_ended([Ended(record.origin, closure, control.epoch)])
    values.encode_round(replace(record, epoch_fixed=control.epoch))
    number = min(control.next_number, MAX_ROUND)  # no round follows the last one
    following = replace(record, number=number, epoch_base=control.epoch, epoch_fixed=None)
    values.encode_round(following)
    values.encode_epoch(following.epoch_base)
    values.encode_round(replace(following, epoch_fixed=following.epoch(REVISION)))
    values.encode_change(replace(change, round=following.number))
    values.encode_node(replace(arriving, arrived_for=following.number))


def test_any_base_of_epochs_that_is_read_has_a_successor_that_can_be_written() -> None:
    base = highest(values.decode_epoch, values.encode_epoch(1), "base")
    record = Round(1, "run", ("a",), JobSettings(1, 2), "h", 1, 7, base)
    values.encode_round(record)
    values.encode_epoch(record.epoch(REVISION))
    claim = values.encode_node(NodeInfo("host~1~x", "h", 1, 1, record.settings))
    for field in ("epoch_seen", "epoch_trained", "clock_us"):
        info = highest(decode_node, claim, field)
        values.encode_node(info)
        base = max(info.epoch_seen, info.epoch_trained, info.clock_us)
        values.encode_round(replace(record, epoch_base=base))


def test_no_node_claims_an_epoch_that_others_would_not_believe() -> None:
    info = NodeInfo("host~1~x", "host", 1, 1, JobSettings(1, 2), epoch_seen=2**63)
    assert decode_node(KEY, values.encode_node(info)).epoch_seen == MAX_EPOCH_CLAIM
    claim = json.loads(values.encode_node(info))
    claim["epoch_seen"] = 2**63 - 1
    with pytest.raises(StateCorruptError, match="epoch_seen"):
        decode_node(KEY, json.dumps(claim).encode())


def test_a_rank_that_the_world_does_not_have_is_refused() -> None:
    value = values.encode_slice({"a": 3, "b": 5})
    assert values.decode_slice(KEY, value, 6) == {"a": 3, "b": 5}
    with pytest.raises(StateCorruptError, match="'ranks'"):
        values.decode_slice(KEY, value, 5)
    with pytest.raises(StateCorruptError, match="twice"):
        values.decode_slice(KEY, b'{"v":1,"ranks":{"a":1,"b":1}}')


def test_the_error_names_the_writer_of_the_value_as_far_as_etcd_knows_it() -> None:
    with pytest.raises(StateCorruptError) as caught:
        values.decode_key(values.decode_leader, KeyValue(KEY, b"?", 5, 17, 3, 0x3F))
    assert KEY.decode() in str(caught.value)
    assert "revision 17" in str(caught.value)
    assert "since revision 5" in str(caught.value)
    assert "lease 000000000000003f" in str(caught.value)
    with pytest.raises(StateCorruptError, match="revision 17 without a lease"):
        values.decode_key(values.decode_leader, KeyValue(KEY, b"?", 17, 17, 1))


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b]0;owned\x07",
        "x\nERROR forged line",
        "x" * 1_000_000,
        "\u202egnp.exe",
        "\x9b31m",
    ],
    ids=["escape", "lines", "long", "direction", "control"],
)
def test_a_foreign_value_is_shown_in_one_short_printable_line(hostile: str) -> None:
    record = Round(1, "run", ("a",), JobSettings(1, 2), "h", 1, 7)
    for spoil in ({"run": 1, "state": hostile}, {"members": [hostile]}, {hostile: 1, "v": hostile}):
        fields = {**json.loads(values.encode_round(record)), **spoil}
        with pytest.raises(StateCorruptError) as caught:
            values.decode_round(KEY, json.dumps(fields).encode())
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "why", ["x" * 10**6, "\x1b[2J" * 99, "\ud800", "\U0001f4a5" * 999, "a\nb", "\0"]
)
def test_a_node_s_reason_for_rejoining_is_bounded_and_printable(why: str) -> None:
    info = NodeInfo("host~1~x", "h", 1, 1, JobSettings(1, 2), because=why)
    because = decode_node(KEY, values.encode_node(info)).because
    assert 0 < len(because) <= 200
    assert because.isprintable()
