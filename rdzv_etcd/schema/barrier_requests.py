"""Every request of a round's named barriers. No I/O here.

Whatever arrives or gives up also counts who is there, in the same transaction.
"""

from __future__ import annotations

from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.api import (
    Compare,
    Delete,
    Get,
    GetResult,
    KeyValue,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.schema.keys import BarrierKeys

_MAX_DIGITS = 18


def arrive(keys: BarrierKeys, turn: int, node_id: str, session: int) -> Txn:
    """Arrive for ``turn``, and forget the arrival before; :func:`answers` tells who is there."""
    changes: list[Op] = [Put(keys.arrival(turn, node_id), b"", session)]
    if turn > 1:
        changes.append(Delete(keys.arrival(turn - 1, node_id)))
    return Txn((), (*changes, *_count(keys, turn)))


def take_back(keys: BarrierKeys, turn: int, node_id: str) -> Txn:
    """Take an arrival back; :func:`answers` tells who was there, this node included."""
    return Txn((), (*_count(keys, turn), Delete(keys.arrival(turn, node_id))))


def announce(
    keys: BarrierKeys,
    turn: int,
    job_lease: int,
    done: KeyValue | None,
    guards: tuple[Compare, ...] = (),
) -> Txn:
    """Say that all have been there ``turn`` times, if ``done`` is still what was said last, and the
    guards hold; otherwise :func:`done_in` the result is what was said."""
    revision = 0 if done is None else done.mod_revision
    return Txn(
        (Compare(keys.done, Target.MOD, Relation.EQUAL, revision), *guards),
        (Put(keys.done, b"%d" % turn, job_lease),),
        (read_done(keys),),
    )


def read_done(keys: BarrierKeys) -> Get:
    return Get(keys.done)


def read_arrivals(keys: BarrierKeys, turn: int) -> Get:
    arrivals = keys.arrivals(turn)
    return Get(arrivals.start, arrivals.end, keys_only=True)


def answers(result: TxnResult) -> tuple[int, KeyValue | None]:
    """Return how many are there, and what was said last, from what arrives or gives up."""
    count, done = (each for each in result.results if isinstance(each, GetResult))
    return count.count, done.kvs[0] if done.kvs else None


def done_in(result: TxnResult) -> KeyValue | None:
    """Return what was said last, from a refused :func:`announce`."""
    (found,) = result.results
    return found.kvs[0] if isinstance(found, GetResult) and found.kvs else None


def turns(done: KeyValue | None) -> int:
    """Return how often all have been there. Raises StateCorruptError."""
    if done is None:
        return 0
    if not done.value.isdigit() or len(done.value) > _MAX_DIGITS:
        raise StateCorruptError(done.key.decode(errors="replace"), "not a number of turns")
    return int(done.value)


def _count(keys: BarrierKeys, turn: int) -> tuple[Get, Get]:
    arrivals = keys.arrivals(turn)
    return Get(arrivals.start, arrivals.end, count_only=True), read_done(keys)
