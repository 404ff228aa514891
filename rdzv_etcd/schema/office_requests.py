"""Every request of a world's named leaderships. No I/O here.

A member's key is put when it begins to stand for a name and when it ceases to, each time guarded by
how often it was put before (its version): so no copy of an earlier request that comes late lets it
stand, or cease to, once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rdzv_etcd.core.elections import Candidate
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.api import (
    Compare,
    Get,
    GetResult,
    KeyValue,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.schema.keys import OfficeKeys

_VALUE = re.compile(rb"(stands|rests) ([0-9]{1,18})")


def stand(keys: OfficeKeys, node_id: str, session: int, version: int, base: int) -> Txn:
    """Begin to stand, if the key was put ``version`` times; :func:`found_in` the result are all
    candidates, either way, and on success its revision is this one's place."""
    key = keys.candidate(node_id)
    return Txn(
        (Compare(key, Target.VERSION, Relation.EQUAL, version),),
        (Put(key, b"stands %d" % base, session), read(keys)),
        (read(keys),),
    )


def rest(keys: OfficeKeys, node_id: str, session: int, version: int, base: int) -> Txn:
    """Cease to stand, if the key was put ``version`` times; otherwise the result holds it."""
    key = keys.candidate(node_id)
    return Txn(
        (Compare(key, Target.VERSION, Relation.EQUAL, version),),
        (Put(key, b"rests %d" % base, session),),
        (read_one(keys, node_id),),
    )


def read(keys: OfficeKeys) -> Get:
    """Read all candidates."""
    return Get(keys.range.start, keys.range.end)


def read_one(keys: OfficeKeys, node_id: str) -> Get:
    return Get(keys.candidate(node_id))


def leads(keys: OfficeKeys, node_id: str, place: int) -> Compare:
    """That a member still stands at its place; one that leads does so until then."""
    return Compare(keys.candidate(node_id), Target.MOD, Relation.EQUAL, place)


def found_in(result: TxnResult) -> tuple[KeyValue, ...]:
    """The keys that :func:`stand`, or a refused :func:`rest`, has read."""
    return next(each.kvs for each in result.results if isinstance(each, GetResult))


def own_in(keys: OfficeKeys, node_id: str, kvs: Iterable[KeyValue]) -> KeyValue | None:
    """The key of one member."""
    key = keys.candidate(node_id)
    return next((kv for kv in kvs if kv.key == key), None)


def stands(kv: KeyValue) -> bool:
    """Whether that key's member stands."""
    return kv.value.startswith(b"stands ")


def candidates(keys: OfficeKeys, kvs: Iterable[KeyValue]) -> list[Candidate]:
    """Raises StateCorruptError for what this library has not written."""
    return [_candidate(keys, kv) for kv in kvs]


def _candidate(keys: OfficeKeys, kv: KeyValue) -> Candidate:
    match = _VALUE.fullmatch(kv.value)
    if match is None or not kv.lease_id:
        raise StateCorruptError(
            kv.key.decode(errors="replace"), "it is not a candidate's, or on no lease"
        )
    return Candidate(
        keys.node_id(kv.key), kv.mod_revision, match[1] == b"stands", int(match[2]), kv.lease_id
    )
