"""Encodes and decodes every value under the job's keys: versioned JSON, never pickle.

A value that this module did not write raises :class:`~rdzv_etcd.errors.StateCorruptError` with the
key's name. Unknown fields are ignored, so that a newer minor version can add some; a newer ``v`` is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rdzv_etcd.core.model import Change, Closure, Ended, Leader, NodeInfo, Round, Slices
from rdzv_etcd.errors import SettingsError, StateCorruptError
from rdzv_etcd.settings import JobSettings

VERSION = 1

T = TypeVar("T")
_MISSING = object()
_MAX_LEASE = 2**63 - 1


class _Fields:
    """Typed access to a JSON object's fields; a problem is a ValueError that names the field."""

    def __init__(self, raw: object) -> None:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        self._raw: dict[str, Any] = raw

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def text(self, name: str, default: object = _MISSING) -> str:
        return str(self._get(name, str, default))

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def whole(self, name: str, default: object = _MISSING, *, least: int = 0) -> int:
        value = self._get(name, int, default)
        if isinstance(value, bool) or not least <= value <= _MAX_LEASE:
            raise ValueError(f"{name!r} is {value!r}, not a whole number from {least} on")
        return int(value)

    def number(self, name: str) -> float:
        value = self._raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name!r} is {value!r}, not a number")
        return float(value)

    def flag(self, name: str) -> bool:
        return bool(self._get(name, bool, _MISSING))

    def texts(self, name: str, default: object = _MISSING) -> tuple[str, ...]:
        value = self._get(name, list, default)
        if not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name!r} holds something else than strings")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, str]:
        value = self._get(name, dict, _MISSING)
        if not all(isinstance(item, str) for item in value.values()):
            raise ValueError(f"{name!r} holds something else than strings")
        return dict(value)

    def wholes(self, name: str) -> dict[str, int]:
        value = self._get(name, dict, _MISSING)
        for key, item in value.items():
            if type(item) is not int or not 0 <= item <= _MAX_LEASE:
                raise ValueError(f"{name!r} gives {key!r} {item!r}, not a whole number from 0 on")
        return dict(value)

    def objects(self, name: str) -> list[_Fields]:
        return [_Fields(item) for item in self._get(name, list, _MISSING)]

    def nested(self, name: str) -> _Fields:
        return _Fields(self._get(name, dict, _MISSING))

    def _get(self, name: str, kind: type, default: object) -> Any:
        value = self._raw.get(name, default)
        if value is _MISSING:
            raise ValueError(f"field {name!r} is missing")
        if not isinstance(value, kind):
            raise ValueError(f"{name!r} is {value!r}, not a {kind.__name__}")
        return value


def _encode(fields: Mapping[str, object]) -> bytes:
    return json.dumps({"v": VERSION, **fields}, separators=(",", ":")).encode()


def _decode(key: bytes, value: bytes, build: Callable[[_Fields], T]) -> T:
    try:
        fields = _Fields(json.loads(value.decode()))
        version = fields.whole("v")
        if version != VERSION:
            raise ValueError(f"it has format version {version}, this library writes {VERSION}")
        return build(fields)
    except (ValueError, OverflowError, RecursionError, SettingsError) as error:
        problem = str(error) or type(error).__name__
        raise StateCorruptError(key.decode(errors="replace"), problem) from error


# --- settings -----------------------------------------------------------------------------------


def _settings_fields(settings: JobSettings) -> dict[str, object]:
    return {
        "min_nodes": settings.min_nodes,
        "max_nodes": settings.max_nodes,
        "node_unit": settings.node_unit,
    }


def _settings(fields: _Fields) -> JobSettings:
    return JobSettings(
        fields.whole("min_nodes"), fields.whole("max_nodes"), fields.whole("node_unit")
    )


# --- presence -----------------------------------------------------------------------------------


def encode_node(info: NodeInfo) -> bytes:
    fields: dict[str, object] = {
        "address": info.address,
        "port": info.port,
        "arrived_for": info.arrived_for,
        "settings": _settings_fields(info.settings),
    }
    if info.rank_key is not None:
        fields["rank_key"] = info.rank_key
    if info.leaving is not None:
        fields["leaving"] = info.leaving
    if info.epoch_seen:
        fields["epoch_seen"] = info.epoch_seen
    return _encode(fields)


def decode_node(key: bytes, node_id: str, value: bytes) -> NodeInfo:
    return _decode(
        key,
        value,
        lambda f: NodeInfo(
            node_id,
            f.text("address"),
            f.whole("port"),
            f.whole("arrived_for"),
            _settings(f.nested("settings")),
            f.optional_text("rank_key"),
            f.optional_text("leaving"),
            f.whole("epoch_seen", 0),
        ),
    )


# --- control ------------------------------------------------------------------------------------


def encode_leader(leader: Leader) -> bytes:
    return _encode({"node": leader.node_id, "settings": _settings_fields(leader.settings)})


def decode_leader(key: bytes, value: bytes) -> Leader:
    return _decode(key, value, lambda f: Leader(f.text("node"), _settings(f.nested("settings"))))


def encode_change(change: Change) -> bytes:
    fields: dict[str, object] = {
        "run": change.run,
        "round": change.round,
        "waiters": list(change.waiters),
        "lost": dict(change.lost),
    }
    if change.unnamed:
        fields["unnamed"] = change.unnamed
    return _encode(fields)


def decode_change(key: bytes, value: bytes) -> Change:
    return _decode(
        key,
        value,
        lambda f: Change(
            f.text("run"),
            f.whole("round"),
            f.texts("waiters"),
            f.mapping("lost"),
            f.whole("unnamed", 0),
        ),
    )


def encode_round(record: Round) -> bytes:
    fields: dict[str, object] = {
        "round": record.number,
        "run": record.run,
        "state": "formed" if record.closure is None else "closed",
        "members": list(record.members),
        "settings": _settings_fields(record.settings),
        "master": {"address": record.master_address, "port": record.master_port},
        "job_lease": f"{record.job_lease:016x}",
        "epoch_base": record.epoch_base,
    }
    if record.epoch_fixed is not None:
        fields["epoch"] = record.epoch_fixed
    if record.expelled:
        fields["expelled"] = list(record.expelled)
    if record.heirs:
        fields["heirs"] = list(record.heirs)
    if record.slices is not None:
        slices = record.slices
        fields["slices"] = {
            "size": slices.size,
            "count": slices.count,
            "edition": slices.edition,
        }
    if record.closure is not None:
        fields["closed"] = _closure_fields(record.closure)
    if record.began_as is not None:
        fields["began_as"] = record.began_as
    return _encode(fields)


def _closure_fields(closure: Closure) -> dict[str, object]:
    return {
        "by": closure.by,
        "reason": closure.reason,
        "succeeded": closure.succeeded,
        "wall_s": closure.wall_s,
    }


def _closure(f: _Fields) -> Closure:
    return Closure(f.text("by"), f.text("reason"), f.flag("succeeded"), f.number("wall_s"))


def decode_round(key: bytes, value: bytes) -> Round:
    return _decode(key, value, _round)


def _round(f: _Fields) -> Round:
    state = f.text("state")
    if state not in ("formed", "closed"):
        raise ValueError(f"'state' is {state!r}, neither 'formed' nor 'closed'")
    closure = None
    if state == "closed":
        closure = _closure(f.nested("closed"))
    members = f.texts("members")
    if len(set(members)) != len(members):
        raise ValueError("'members' names a node twice")
    slices = None
    if f.has("slices"):
        sliced = f.nested("slices")
        slices = Slices(
            sliced.whole("size", least=1), sliced.whole("count", least=1), sliced.text("edition")
        )
        if members:
            raise ValueError("it names members beside its 'slices'")
    lease = int(f.text("job_lease"), 16)
    if not 0 <= lease <= _MAX_LEASE:
        raise ValueError(f"'job_lease' is {f.text('job_lease')!r}, not a lease id")
    master = f.nested("master")
    return Round(
        f.whole("round", least=1),
        f.text("run"),
        members,
        _settings(f.nested("settings")),
        master.text("address"),
        master.whole("port"),
        lease,
        f.whole("epoch_base", 0),
        f.whole("epoch") if f.has("epoch") else None,
        f.texts("expelled", []),
        closure,
        slices,
        f.texts("heirs", []),
        f.optional_text("began_as"),
    )


def encode_ended(ended: Sequence[Ended]) -> bytes:
    return _encode(
        {
            "runs": [
                {"run": run.origin, "epoch": run.epoch, **_closure_fields(run.closure)}
                for run in ended
            ]
        }
    )


def decode_ended(key: bytes, value: bytes) -> tuple[Ended, ...]:
    return _decode(
        key,
        value,
        lambda f: tuple(
            Ended(run.text("run"), _closure(run), run.whole("epoch", 0))
            for run in f.objects("runs")
        ),
    )


# --- slices -------------------------------------------------------------------------------------


def encode_slice(ranks: Mapping[str, int]) -> bytes:
    return _encode({"ranks": dict(ranks)})


def decode_slice(key: bytes, value: bytes) -> dict[str, int]:
    return _decode(key, value, lambda f: f.wholes("ranks"))
