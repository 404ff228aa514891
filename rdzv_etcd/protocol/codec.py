"""Encodes and decodes every value under the job's keys: versioned JSON, never pickle.

A value that this module did not write raises :class:`~rdzv_etcd.errors.StateCorruptError` with the
key's name, and one that it could not read :class:`~rdzv_etcd.errors.UnwritableValueError` instead
of being written. Unknown fields are ignored, so that a newer minor version can add some; a newer
``v`` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.fields import (
    MAX_EPOCH,
    VERSION,
    Fields,
    a_name,
    decode,
    decode_key,
    encode,
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
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_DATA, MAX_EPOCH_CLAIM, MAX_NODES, MAX_ROUND
from rdzv_etcd.text import shown

__all__ = ["VERSION", "decode_key"]

_LEASE = re.compile("[0-9a-f]{1,16}")
_MAX_LEASE = 2**63 - 1
_MAX_PORT = 65535
_ACCUSED = "accused"
_MAX_ROUND_TRIP_MS = 10_000
"""Whoever is farther away than that has no time to answer."""
_MAX_AFTER_MS = 3_600_000
_MAX_TTL_S = 9_000_000_000
"""etcd grants no lease for longer."""


# --- settings -----------------------------------------------------------------------------------


def _settings_fields(settings: JobSettings) -> dict[str, object]:
    return {
        "min_nodes": settings.min_nodes,
        "max_nodes": settings.max_nodes,
        "node_unit": settings.node_unit,
    }


def _settings(fields: Fields) -> JobSettings:
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
        # Who says more is not believed.
        fields["epoch_seen"] = min(info.epoch_seen, MAX_EPOCH_CLAIM)
    if info.epoch_trained:
        fields["epoch_trained"] = min(info.epoch_trained, MAX_EPOCH_CLAIM)
    if info.clock_us:
        fields["clock_us"] = min(max(0, info.clock_us), MAX_EPOCH_CLAIM)
    if info.data:
        fields["data"] = dict(info.data)
    if info.peer_port:
        fields["peer_port"] = info.peer_port
    if info.round_trip_ms:
        fields["round_trip_ms"] = min(info.round_trip_ms, _MAX_ROUND_TRIP_MS)
    if info.because:
        fields["because"] = shown(info.because)
    if info.lease_ttl_s:
        fields["lease_ttl"] = info.lease_ttl_s
    if info.finished:
        fields["finished"] = True
    return encode(fields, lambda f: _node(info.node_id, f))


def _node(node_id: str, f: Fields) -> NodeInfo:
    if is_unknown(a_name("the node's id", node_id)):
        raise ValueError("its name is reserved for nodes whose names are not known")
    return NodeInfo(
        node_id,
        _address(f),
        f.whole("port", least=1, most=_MAX_PORT),
        f.whole("arrived_for", most=2 * MAX_ROUND),
        _settings(f.nested("settings")),
        f.optional_text("rank_key"),
        f.optional_text("leaving"),
        f.whole("epoch_seen", 0, most=MAX_EPOCH_CLAIM),
        f.whole("epoch_trained", 0, most=MAX_EPOCH_CLAIM),
        f.whole("clock_us", 0, most=MAX_EPOCH_CLAIM),
        f.data("data", most=MAX_DATA) if f.has("data") else {},
        f.whole("peer_port", 0, most=_MAX_PORT),
        f.whole("round_trip_ms", 0, most=_MAX_ROUND_TRIP_MS),
        f.optional_text("because") or "",
        f.whole("lease_ttl", 0, most=_MAX_TTL_S),
        f.flag("finished") if f.has("finished") else False,
    )


def encode_accusation(accusation: Accusation) -> bytes:
    fields: dict[str, object] = {
        "by": accusation.by,
        "how": accusation.how,
        "certain": accusation.is_certain,
    }
    if accusation.round_trip_ms:
        fields["round_trip_ms"] = accusation.round_trip_ms
    if accusation.after_ms is not None:
        fields["after_ms"] = min(accusation.after_ms, _MAX_AFTER_MS)
    return encode({_ACCUSED: fields}, _accusation)


def decode_place(key: bytes, node_id: str, value: bytes) -> NodeInfo | Accusation:
    """Read what stands in the place of a node's presence: that, or an accusation."""
    return decode(key, value, lambda f: _accusation(f) if f.has(_ACCUSED) else _node(node_id, f))


def _accusation(f: Fields) -> Accusation:
    accused = f.nested(_ACCUSED)
    return Accusation(
        accused.name("by"),
        accused.text("how"),
        accused.flag("certain"),
        accused.whole("round_trip_ms", 0, most=_MAX_ROUND_TRIP_MS),
        accused.whole("after_ms", most=_MAX_AFTER_MS) if accused.has("after_ms") else None,
    )


def _address(f: Fields) -> str:
    address = f.name("address")
    if " " in address:  # it becomes MASTER_ADDR
        raise ValueError(f"'address' is {address[:80]!r}, neither a host name nor an address")
    return address


# --- control ------------------------------------------------------------------------------------


def encode_leader(leader: Leader) -> bytes:
    fields = {"node": leader.node_id, "settings": _settings_fields(leader.settings)}
    return encode(fields, _leader)


def decode_leader(key: bytes, value: bytes) -> Leader:
    return decode(key, value, _leader)


def _leader(f: Fields) -> Leader:
    return Leader(f.name("node"), _settings(f.nested("settings")))


def encode_change(change: Change) -> bytes:
    fields: dict[str, object] = {
        "run": change.run,
        "round": change.round,
        "waiters": list(change.waiters),
        "lost": dict(change.lost),
    }
    if change.unnamed:
        fields["unnamed"] = change.unnamed
    if change.because:
        fields["because"] = dict(change.because)
    return encode(fields, _change)


def decode_change(key: bytes, value: bytes) -> Change:
    return decode(key, value, _change)


def _change(f: Fields) -> Change:
    return Change(
        f.name("run"),
        f.whole("round", most=2 * MAX_ROUND),
        f.names("waiters"),
        f.texts_by_name("lost"),
        f.whole("unnamed", 0, most=2 * MAX_NODES),
        f.texts_by_name("because") if f.has("because") else {},
    )


def encode_drain(drain: Drain) -> bytes:
    fields: dict[str, object] = {"by": drain.by, "reason": drain.reason}
    if drain.epoch:
        fields["epoch"] = drain.epoch
    return encode(fields, _drain)


def decode_drain(key: bytes, value: bytes) -> Drain:
    return decode(key, value, _drain)


def _drain(f: Fields) -> Drain:
    return Drain(f.name("by"), f.text("reason"), f.whole("epoch", 0, most=2 * MAX_EPOCH))


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
    if record.lease_ttls_s is not None:
        shortest_s, longest_s = record.lease_ttls_s
        fields["lease_ttls"] = {"shortest": shortest_s, "longest": longest_s}
    return encode(fields, _round)


def _closure_fields(closure: Closure) -> dict[str, object]:
    return {
        "by": closure.by,
        "reason": closure.reason,
        "succeeded": closure.succeeded,
        "wall_s": closure.wall_s,
    }


def _closure(f: Fields) -> Closure:
    return Closure(f.name("by"), f.text("reason"), f.flag("succeeded"), f.number("wall_s"))


def decode_round(key: bytes, value: bytes) -> Round:
    return decode(key, value, _round)


def _round(f: Fields) -> Round:
    state = f.text("state")
    if state not in ("formed", "closed"):
        raise ValueError(f"'state' is {state!r}, neither 'formed' nor 'closed'")
    closure = None
    if state == "closed":
        closure = _closure(f.nested("closed"))
    members = f.names("members")
    if len(set(members)) != len(members):
        raise ValueError("'members' names a node twice")
    settings, slices = _settings(f.nested("settings")), None
    size = len(members)
    if f.has("slices"):
        if members:
            raise ValueError("it names members and has 'slices' as well")
        slices = _slices(f.nested("slices"))
        size = slices.size
    if size > settings.max_nodes:
        raise ValueError(f"it has {size} members, more than its 'max_nodes' {settings.max_nodes}")
    lease = f.text("job_lease")
    if not _LEASE.fullmatch(lease) or int(lease, 16) > _MAX_LEASE:
        raise ValueError(f"'job_lease' is {lease[:80]!r}, not a lease id")
    master = f.nested("master")
    return Round(
        f.whole("round", least=1, most=MAX_ROUND),
        f.name("run"),
        members,
        settings,
        _address(master),
        master.whole("port", least=1, most=_MAX_PORT),
        int(lease, 16),
        f.counted("epoch_base", 0, most=MAX_EPOCH),
        f.counted("epoch", most=MAX_EPOCH) if f.has("epoch") else None,
        f.names("expelled", []),
        closure,
        slices,
        f.names("heirs", []),
        f.name("began_as") if f.has("began_as") else None,
        _lease_ttls_s(f.nested("lease_ttls")) if f.has("lease_ttls") else None,
    )


def _lease_ttls_s(f: Fields) -> tuple[int, int]:
    shortest_s = f.whole("shortest", least=1, most=_MAX_TTL_S)
    return shortest_s, f.whole("longest", least=shortest_s, most=_MAX_TTL_S)


def _slices(f: Fields) -> Slices:
    size = f.whole("size", least=1, most=MAX_NODES)
    return Slices(size, f.whole("count", least=1, most=size), f.name("edition"))


def encode_ended(ended: Sequence[Ended]) -> bytes:
    runs = [
        {
            "run": run.origin,
            "epoch": min(run.epoch, MAX_EPOCH_CLAIM),
            **_closure_fields(run.closure),
        }
        for run in ended
    ]
    return encode({"runs": runs}, _ended)


def decode_ended(key: bytes, value: bytes) -> tuple[Ended, ...]:
    return decode(key, value, _ended)


def _ended(f: Fields) -> tuple[Ended, ...]:
    return tuple(
        Ended(run.name("run"), _closure(run), run.whole("epoch", 0, most=MAX_EPOCH_CLAIM))
        for run in f.objects("runs")
    )


def encode_epoch(base: int) -> bytes:
    return encode({"base": base}, _epoch)


def decode_epoch(key: bytes, value: bytes) -> int:
    return decode(key, value, _epoch)


def _epoch(f: Fields) -> int:
    return f.counted("base", most=MAX_EPOCH)


# --- refused nodes ------------------------------------------------------------------------------


def encode_refused(refused: Refused) -> bytes:
    fields: dict[str, object] = {
        "node": refused.node_id,
        "settings": _settings_fields(refused.settings),
        "wall_s": refused.wall_s,
    }
    if refused.how:
        fields["how"] = refused.how
    return encode(fields, _refused)


def decode_refused(key: bytes, value: bytes) -> Refused:
    return decode(key, value, _refused)


def _refused(f: Fields) -> Refused:
    settings = _settings(f.nested("settings"))
    return Refused(f.name("node"), settings, f.number("wall_s"), f.optional_text("how") or "")


# --- slices -------------------------------------------------------------------------------------


def encode_slice(ranks: Mapping[str, int]) -> bytes:
    return encode({"ranks": dict(ranks)}, _ranks)


def decode_slice(key: bytes, value: bytes, size: int = MAX_NODES) -> dict[str, int]:
    """``size`` is the world's: every rank is below it."""
    return decode(key, value, lambda f: _ranks(f, size))


def _ranks(f: Fields, size: int = MAX_NODES) -> dict[str, int]:
    ranks = f.wholes_by_name("ranks", most=size - 1)
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("'ranks' gives a rank twice")
    return ranks
