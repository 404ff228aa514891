"""The values under the job's keys: versioned JSON, never pickle.

A value that this module did not write raises :class:`~rdzv_etcd.errors.StateCorruptError` with the
key's name, and one that it could not read :class:`~rdzv_etcd.errors.UnwritableValueError` instead
of being written. Unknown fields are ignored, so that a newer minor version can add some; a newer
``v`` is refused. What a field may hold is stated with it in :mod:`rdzv_etcd.protocol.model`; its
name stands here where it is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, TypeVar, get_args, get_type_hints

from rdzv_etcd.errors import (
    SettingsError,
    StateCorruptError,
    StateVersionError,
    UnwritableValueError,
)
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.protocol.fields import (
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Epoch,
    Kind,
    Object,
    an_object,
    by_name,
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
from rdzv_etcd.settings.fields import MAX_NODES

VERSION = 1

T = TypeVar("T")


# --- objects --------------------------------------------------------------------------------------


_KINDS: dict[Any, Kind[Any]] = {bool: FLAG, float: NUMBER, int: WHOLE}
"""The bounds of types that name none; objects that are parts of others are added below."""


def _object(
    make: Callable[..., T],
    check: Callable[[T], object] = lambda _: None,
    *,
    apart: Collection[str] = (),
    always: Collection[str] = (),
    **names: str,
) -> Kind[T]:
    """Return how a dataclass is written: its fields in their order, each as its type says. One that
    has a default may be missing, and the default is not written.

    ``check`` raises ValueError for an impossible value that was read or is to be written.
    ``apart``: fields that are not written, as they are known otherwise; a reader adds them.
    ``always``: those whose default is written as well. ``names``: theirs as written, where they
    differ; with a dot, inside of another object.
    """
    hints = get_type_hints(make, include_extras=True)
    entries = []
    for each in fields(make):  # type: ignore[arg-type]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        outer, _, field = names.get(each.name, each.name).rpartition(".")
        kind = kind_of(hints[each.name])
        entries.append((each.name, outer, field, kind, default, each.name in always))

    def read(name: str, raw: Any) -> T:
        raw, found = an_object(name, raw), Object()
        for attribute, outer, field, kind, default, _ in entries:
            value = (an_object(outer, raw.get(outer, {})) if outer else raw).get(field)
            if value is not None:
                found[attribute] = kind.read(field, value)
            elif default is MISSING:
                raise ValueError(f"field {field!r} is missing")
        made = make(**found)
        check(made)
        return made

    def write(_name: str, value: T) -> Object:
        check(value)
        written: Object = {}
        for attribute, outer, field, kind, default, is_always in entries:
            part = getattr(value, attribute)
            if attribute in apart:
                kind.write(attribute, part)
            elif is_always or part != default:
                inside = written.setdefault(outer, {}) if outer else written
                inside[field] = kind.write(field, part)
        return written

    return Kind(read, write)


def kind_of(hint: Any) -> Kind[Any]:
    """Return the bounds of a type, with or without ``None``: that stands for a missing field."""
    parts = get_args(hint)
    if type(None) in parts:
        (hint,) = (each for each in parts if each is not type(None))
    found = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Kind)]
    return found[0] if found else _KINDS[hint]


def _part(make: type[T], *args: Any, **named: Any) -> Kind[T]:
    """As :func:`_object`, for one that is also a field of others."""
    kind: Kind[T] = _object(make, *args, **named)
    _KINDS[make] = kind
    return kind


def _alone(field: str, kind: Kind[T]) -> Kind[T]:
    """An object with this one field, whose value is all there is to it."""

    def read(name: str, raw: Any) -> T:
        value = an_object(name, raw).get(field)
        if value is None:
            raise ValueError(f"field {field!r} is missing")
        return kind.read(field, value)

    return Kind(read, lambda _, value: {field: kind.write(field, value)})


# --- bytes ----------------------------------------------------------------------------------------


def encode(kind: Kind[T], value: T) -> bytes:
    """Return the bytes. Raises :class:`~rdzv_etcd.errors.UnwritableValueError` for a value that
    others could not read."""
    try:
        written = {"v": VERSION, **kind.write("value", value)}
        return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, OverflowError) as error:
        raise UnwritableValueError(str(error)) from error


def decode(key: bytes, value: bytes, read: Callable[[str, Any], T]) -> T:
    """Read a value. Raises :class:`~rdzv_etcd.errors.StateCorruptError`."""
    try:
        raw = _JSON.decode(value.decode())
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        version = WHOLE.read("v", raw.get("v"))
        if version != VERSION:
            problem = f"it has format version {version}, and this library reads {VERSION}"
            raise StateVersionError(key.decode(errors="replace"), problem)
        return read("value", raw)
    except (ValueError, OverflowError, RecursionError, SettingsError) as error:
        problem = str(error) or type(error).__name__
        raise StateCorruptError(key.decode(errors="replace"), problem) from error


def decode_key(decode_value: Callable[[bytes, bytes], T], kv: KeyValue) -> T:
    """Decode the value of a key. Raises StateCorruptError, which names its writer."""
    try:
        return decode_value(kv.key, kv.value)
    except StateCorruptError as error:
        raise type(error)(error.key, error.problem, _writer(kv)) from error.__cause__


def _writer(kv: KeyValue) -> str:
    """Describe the writer of a key, as far as etcd knows it."""
    created = "" if kv.version == 1 else f" (the key exists since revision {kv.create_revision})"
    if not kv.lease_id:
        return f"written at revision {kv.mod_revision}{created} without a lease"
    return (
        f"written at revision {kv.mod_revision}{created} on lease {kv.lease_id:016x}; "
        f"`etcdctl lease timetolive {kv.lease_id:x} --keys` shows what else its writer keeps there"
    )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has the same field twice")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"it contains {constant}, which is not JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_once_each, parse_constant=_refuse)


def _codec(kind: Kind[T]) -> tuple[Callable[[T], bytes], Callable[[bytes, bytes], T]]:
    return partial(encode, kind), lambda key, value: decode(key, value, kind.read)


# --- presence -------------------------------------------------------------------------------------


_part(JobSettings, always=("node_unit",))
_NODE = _object(NodeInfo, apart=("node_id",), lease_ttl_s="lease_ttl")
_ACCUSED = _alone("accused", _object(Accusation, is_certain="certain"))

encode_node = partial(encode, _NODE)
encode_accusation = partial(encode, _ACCUSED)


def decode_place(key: bytes, node_id: str, value: bytes) -> NodeInfo | Accusation:
    """Read the value in a node's place: its presence, or an accusation."""

    def read(name: str, raw: Object) -> NodeInfo | Accusation:
        if raw.get("accused") is not None:
            return _ACCUSED.read(name, raw)
        return _NODE.read(name, {**raw, "node_id": node_id})

    return decode(key, value, read)


# --- control --------------------------------------------------------------------------------------


encode_leader, decode_leader = _codec(_object(Leader, node_id="node"))
encode_change, decode_change = _codec(_object(Change, always=("waiters", "lost")))
encode_drain, decode_drain = _codec(_object(Drain))
encode_refused, decode_refused = _codec(_object(Refused, node_id="node"))
encode_epoch, decode_epoch = _codec(_alone("base", kind_of(Epoch)))


def _slices_fit(slices: Slices) -> None:
    whole(1, slices.size).read("count", slices.count)


def _ttls_fit(ttls: Ttls) -> None:
    whole(ttls.shortest).read("longest", ttls.longest)


def _record_fits(record: Round) -> None:
    members, size = record.members, record.size
    if len(set(members)) != len(members):
        raise ValueError("'members' names a node twice")
    if members and record.slices is not None:
        raise ValueError("it names members and has 'slices' as well")
    most = record.settings.max_nodes
    if size > most:
        raise ValueError(f"it has {size} members, more than its 'max_nodes' {most}")


_CLOSURE = _part(Closure)
_part(Slices, _slices_fit)
_part(Ttls, _ttls_fit)
_ROUND = _object(
    Round,
    _record_fits,
    always=("epoch_base",),
    number="round",
    master_address="master.address",
    master_port="master.port",
    epoch_fixed="epoch",
    closure="closed",
    lease_ttls_s="lease_ttls",
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


def _write_round(name: str, record: Round) -> Object:
    written = _ROUND.write(name, record)
    head = {field: written.pop(field) for field in ("round", "run")}
    return {**head, "state": "closed" if record.closure else "formed", **written}


encode_round, decode_round = _codec(Kind(_read_round, _write_round))
_ENDED = _object(Ended, apart=("closure",), always=("epoch",), origin="run")
"""Its closure's fields stand beside its own."""
encode_ended, decode_ended = _codec(
    _alone(
        "runs",
        several(
            Kind(
                lambda name, raw: _ENDED.read(name, {**an_object(name, raw), "closure": raw}),
                lambda name, run: {**_ENDED.write(name, run), **_CLOSURE.write(name, run.closure)},
            )
        ),
    )
)


# --- slices ---------------------------------------------------------------------------------------


def _slice(size: int) -> Kind[dict[str, int]]:
    ranks = by_name(whole(0, size - 1))

    def read(name: str, value: Any) -> dict[str, int]:
        found = ranks.read(name, value)
        if len(set(found.values())) != len(found):
            raise ValueError(f"{name!r} gives a rank twice")
        return found

    return _alone("ranks", Kind(read, read))


def encode_slice(ranks: Mapping[str, int]) -> bytes:
    return encode(_slice(MAX_NODES), dict(ranks))


def decode_slice(key: bytes, value: bytes, size: int = MAX_NODES) -> dict[str, int]:
    """``size`` is the world's: every rank is below it."""
    return decode(key, value, _slice(size).read)
