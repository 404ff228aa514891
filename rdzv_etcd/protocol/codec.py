"""The values under the job's keys: versioned JSON, never pickle.

A value that this module did not write raises :class:`~rdzv_etcd.errors.StateCorruptError` with the
key's name, and one that it could not read :class:`~rdzv_etcd.errors.UnwritableValueError` instead
of being written. Unknown fields are ignored, so that a newer minor version can add some; a newer
``v`` is refused. Each type's fields stand here once, in the order in which they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.fields import (
    FLAG,
    NAME,
    NAMES,
    NUMBER,
    SHOWN,
    TEXT,
    VERSION,
    At,
    Kind,
    Object,
    Shape,
    a_name,
    alone,
    by_name,
    clamped,
    counted,
    data,
    decode,
    decode_key,
    encode,
    several,
    whole,
)
from rdzv_etcd.protocol.model import (
    Accusation,
    Change,
    Closure,
    Drain,
    Ended,
    Leader,
    NodeInfo,
    Refused,
    Round,
    Slices,
    Ttls,
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_DATA, MAX_EPOCH_CLAIM, MAX_NODES, MAX_ROUND

__all__ = ["VERSION", "decode_key"]

T = TypeVar("T")

MAX_EPOCH = 2**61
"""Of a record that is read, and of the base of epochs. The next base may be higher by etcd's
revision; with that added once more it still is a number of 64 bits."""
_LEASE = re.compile("[0-9a-f]{1,16}")
_MAX_LEASE = 2**63 - 1
_MAX_PORT = 65535
_PORT = whole(1, _MAX_PORT)
_CLAIM = clamped(MAX_EPOCH_CLAIM)
"""An epoch, or a clock; no node believes a higher one."""
_ROUND_TRIP = clamped(10_000)
"""A node that is farther away than that has no time to answer."""
_MAX_TTL_S = 9_000_000_000
"""etcd grants no lease for longer."""
_TTL = whole(1, _MAX_TTL_S)


def _an_address(name: str, value: object) -> str:
    address = a_name(name, value)
    if " " in address:  # it becomes MASTER_ADDR
        raise ValueError(f"{name!r} is {address[:80]!r}, neither a host name nor an address")
    return address


_ADDRESS = Kind(_an_address, _an_address)
_SETTINGS = Shape(
    JobSettings, min_nodes=whole(), max_nodes=whole(), node_unit=At(whole(), always=True)
).kind
_CLOSURE = Shape(Closure, by=NAME, reason=TEXT, succeeded=FLAG, wall_s=NUMBER)


def _codec(kind: Kind[T]) -> tuple[Callable[[T], bytes], Callable[[bytes, bytes], T]]:
    return partial(encode, kind), lambda key, value: decode(key, value, kind.read)


# --- presence -----------------------------------------------------------------------------------


def _can_be_a_node(node_id: str) -> None:
    if is_unknown(a_name("the node's id", node_id)):
        raise ValueError("its name is reserved for nodes whose names are not known")


_NODE = Shape(
    NodeInfo,
    lambda info: _can_be_a_node(info.node_id),
    address=_ADDRESS,
    port=_PORT,
    arrived_for=whole(0, 2 * MAX_ROUND),
    settings=_SETTINGS,
    rank_key=TEXT,
    leaving=TEXT,
    epoch_seen=_CLAIM,
    epoch_trained=_CLAIM,
    clock_us=_CLAIM,
    data=data(MAX_DATA),
    peer_port=whole(0, _MAX_PORT),
    round_trip_ms=_ROUND_TRIP,
    because=SHOWN,
    lease_ttl=At(whole(0, _MAX_TTL_S), "lease_ttl_s"),
    finished=FLAG,
)
_ACCUSATION = Shape(
    Accusation,
    by=NAME,
    how=TEXT,
    certain=At(FLAG, "is_certain"),
    round_trip_ms=_ROUND_TRIP,
    after_ms=clamped(3_600_000),
)
_ACCUSED = alone("accused", _ACCUSATION.kind)

encode_node = partial(encode, _NODE.kind)
encode_accusation = partial(encode, _ACCUSED)


def decode_place(key: bytes, node_id: str, value: bytes) -> NodeInfo | Accusation:
    """Read the value in a node's place: its presence, or an accusation."""

    def read(name: str, raw: Object) -> NodeInfo | Accusation:
        if raw.get("accused") is not None:
            return _ACCUSED.read(name, raw)
        _can_be_a_node(node_id)
        return NodeInfo(node_id, **_NODE.arguments(name, raw))

    return decode(key, value, read)


# --- control ------------------------------------------------------------------------------------


encode_leader, decode_leader = _codec(
    Shape(Leader, node=At(NAME, "node_id"), settings=_SETTINGS).kind
)
encode_change, decode_change = _codec(
    Shape(
        Change,
        run=NAME,
        round=whole(0, 2 * MAX_ROUND),
        waiters=At(NAMES, always=True),
        lost=At(by_name(TEXT), always=True),
        unnamed=whole(0, 2 * MAX_NODES),
        because=by_name(TEXT),
    ).kind
)
encode_drain, decode_drain = _codec(
    Shape(Drain, by=NAME, reason=TEXT, epoch=whole(0, 2 * MAX_EPOCH)).kind
)


def _is_a_lease(name: str, text: str) -> int:
    if not _LEASE.fullmatch(text) or int(text, 16) > _MAX_LEASE:
        raise ValueError(f"{name!r} is {text[:80]!r}, not a lease id")
    return int(text, 16)


def _lease_text(name: str, lease: int) -> str:
    text = f"{lease:016x}"
    _is_a_lease(name, text)
    return text


_LEASE_ID = Kind(lambda name, value: _is_a_lease(name, a_name(name, value)), _lease_text)


def _slices_fit(slices: Slices) -> None:
    whole(1, slices.size).read("count", slices.count)


_SLICES = Shape(Slices, _slices_fit, size=whole(1, MAX_NODES), count=whole(1), edition=NAME).kind


def _ttls_fit(ttls: Ttls) -> None:
    whole(ttls.shortest).read("longest", ttls.longest)


_TTLS = Shape(Ttls, _ttls_fit, shortest=_TTL, longest=_TTL).kind


def _record_fits(record: Round) -> None:
    members, size = record.members, record.size
    if len(set(members)) != len(members):
        raise ValueError("'members' names a node twice")
    if members and record.slices is not None:
        raise ValueError("it names members and has 'slices' as well")
    most = record.settings.max_nodes
    if size > most:
        raise ValueError(f"it has {size} members, more than its 'max_nodes' {most}")


_MASTER = Shape(Round, address=At(_ADDRESS, "master_address"), port=At(_PORT, "master_port"))
_ROUND = Shape(
    Round,
    _record_fits,
    round=At(whole(1, MAX_ROUND), "number"),
    run=NAME,
    state=At(Kind(lambda *_: {}, lambda _, record: "closed" if record.closure else "formed"), ""),
    members=NAMES,
    settings=_SETTINGS,
    master=At(Kind(_MASTER.arguments, _MASTER.write), ""),
    job_lease=_LEASE_ID,
    epoch_base=At(counted(MAX_EPOCH), always=True),
    epoch=At(counted(MAX_EPOCH), "epoch_fixed"),
    expelled=NAMES,
    heirs=NAMES,
    slices=_SLICES,
    closed=At(_CLOSURE.kind, "closure"),
    began_as=NAME,
    lease_ttls=At(_TTLS, "lease_ttls_s"),
)


def _read_round(name: str, raw: Any) -> Round:
    state = TEXT.read("state", raw.get("state"))
    if state not in ("formed", "closed"):
        raise ValueError(f"'state' is {state!r}, neither 'formed' nor 'closed'")
    if state == "formed":
        raw = {**raw, "closed": None}
    elif raw.get("closed") is None:
        raise ValueError("field 'closed' is missing")
    return _ROUND.read(name, raw)


encode_round, decode_round = _codec(Kind(_read_round, _ROUND.write))
_RUN = Shape(
    Ended,
    run=At(NAME, "origin"),
    epoch=At(clamped(MAX_EPOCH_CLAIM), always=True),
)


encode_ended, decode_ended = _codec(
    alone(
        "runs",
        several(
            Kind(
                lambda name, raw: Ended(
                    closure=_CLOSURE.read(name, raw), **_RUN.arguments(name, raw)
                ),
                lambda name, run: {**_RUN.write(name, run), **_CLOSURE.write(name, run.closure)},
            )
        ),
    )
)
encode_epoch, decode_epoch = _codec(alone("base", counted(MAX_EPOCH)))
encode_refused, decode_refused = _codec(
    Shape(
        Refused,
        node=At(NAME, "node_id"),
        settings=_SETTINGS,
        wall_s=NUMBER,
        how=TEXT,
    ).kind
)


# --- slices -------------------------------------------------------------------------------------


def _slice(size: int) -> Kind[dict[str, int]]:
    ranks = by_name(whole(0, size - 1))

    def read(name: str, value: Any) -> dict[str, int]:
        found = ranks.read(name, value)
        if len(set(found.values())) != len(found):
            raise ValueError(f"{name!r} gives a rank twice")
        return found

    return alone("ranks", Kind(read, read))


def encode_slice(ranks: Mapping[str, int]) -> bytes:
    return encode(_slice(MAX_NODES), dict(ranks))


def decode_slice(key: bytes, value: bytes, size: int = MAX_NODES) -> dict[str, int]:
    """``size`` is the world's: every rank is below it."""
    return decode(key, value, _slice(size).read)
