"""Every request of a world's barriers and exchanges. No I/O here.

Each member has a *mark* under each name: a key that only it puts, with each of its writes there,
and guarded by the mark's revision as it last knew it. Of all copies of its requests one at most is
therefore applied, and one that comes late does nothing. What says that all have given is guarded in
the same way by its own revision.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Get,
    GetResult,
    KeyValue,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.protocol.keys import CollectiveKeys

_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is under one name."""

    revision: int
    mark: KeyValue | None
    """Of the member that looks."""
    done: KeyValue | None
    count: int
    """How many have given in the turn that was looked at ..."""
    ranks: frozenset[int]
    """... and who they are, if that was asked for."""
    own: frozenset[int]
    """In which turns the member that looks has given, of that one and the one before, if that was
    asked for."""

    @property
    def mark_revision(self) -> int:
        return 0 if self.mark is None else self.mark.mod_revision

    @property
    def turns(self) -> int:
        """How many turns are done. Raises StateCorruptError."""
        return turns(self.done)


def give(
    keys: CollectiveKeys,
    rank: int,
    turn: int,
    data: bytes,
    job_lease: int,
    *,
    mark: int,
    record: Compare,
) -> Txn:
    """Give ``data`` in ``turn`` and forget what was given two turns before, if this member's mark
    is of the revision ``mark`` and the round's ``record`` is the world's.

    Either way :func:`seen_in` returns what is there, and :func:`gives` tells by this member's mark
    whether an earlier copy of this was applied."""
    forgotten = (Delete(keys.given(turn - 2, rank)),) if turn > 2 else ()
    return Txn(
        (_is_at(keys.mark(rank), mark), record),
        (
            Put(keys.mark(rank), _gives(turn), job_lease),
            Put(keys.given(turn, rank), data, job_lease),
            *forgotten,
            *_look(keys, rank, turn),
        ),
        _look(keys, rank, turn),
    )


def take_back(keys: CollectiveKeys, rank: int, turn: int, job_lease: int, seen: Seen) -> Txn:
    """Take back what this member has given in ``turn``, or is about to, if its mark is as it was
    ``seen`` and nobody has given anything since: whoever counts after this does not count it."""
    given = keys.all_given(turn)
    return Txn(
        (
            _is_at(keys.mark(rank), seen.mark_revision),
            Compare(given.start, Target.MOD, Relation.LESS, seen.revision + 1, given.end),
        ),
        (
            Put(keys.mark(rank), b"took back %d" % turn, job_lease),
            Delete(keys.given(turn, rank)),
        ),
    )


def announce(
    keys: CollectiveKeys, turn: int, job_lease: int, done: KeyValue | None, record: Compare
) -> Txn:
    """Say that all have given in ``turn``, if ``done`` is still what was said last and the round's
    record is the world's; otherwise :func:`done_in` the result is what was said."""
    return Txn(
        (_is_at(keys.done, 0 if done is None else done.mod_revision), record),
        (Put(keys.done, b"%d" % turn, job_lease),),
        (read_done(keys),),
    )


def look(keys: CollectiveKeys, rank: int, turn: int, *, names: bool) -> Txn:
    """Read what there is of ``turn``, and whether this member has given in it and in the one
    before; ``names``: also who has."""
    own = (Get(keys.given(each, rank), keys_only=True) for each in (turn, turn - 1))
    return Txn((), (*_look(keys, rank, turn, names=names), *own))


def read_done(keys: CollectiveKeys) -> Get:
    return Get(keys.done)


def _look(
    keys: CollectiveKeys, rank: int, turn: int, *, names: bool = False
) -> tuple[Get, Get, Get]:
    given = keys.all_given(turn)
    return (
        Get(keys.mark(rank)),
        read_done(keys),
        Get(given.start, given.end, keys_only=names, count_only=not names),
    )


def seen_in(keys: CollectiveKeys, turn: int, result: TxnResult) -> Seen:
    """Return what :func:`give` or :func:`look` has read."""
    mark, done, given, *own = (each for each in result.results if isinstance(each, GetResult))
    return Seen(
        result.revision,
        mark.kvs[0] if mark.kvs else None,
        done.kvs[0] if done.kvs else None,
        given.count,
        frozenset(keys.rank(kv.key) for kv in given.kvs),
        frozenset(each for each, got in zip((turn, turn - 1), own, strict=False) if got.kvs),
    )


def done_in(result: TxnResult) -> KeyValue | None:
    """Return what was said last, from a refused :func:`announce`."""
    (found,) = result.results
    return found.kvs[0] if isinstance(found, GetResult) and found.kvs else None


def gives(mark: KeyValue | None, turn: int) -> bool:
    """Whether the last write of a mark's member was to give something in ``turn``."""
    return mark is not None and mark.value == _gives(turn)


def turns(done: KeyValue | None) -> int:
    """Return in how many turns all have given. Raises StateCorruptError."""
    if done is None:
        return 0
    if not done.value.isdigit() or len(done.value) > _MAX_DIGITS:
        raise StateCorruptError(done.key.decode(errors="replace"), "not a number of turns")
    return int(done.value)


def _gives(turn: int) -> bytes:
    return b"gives %d" % turn


def _is_at(key: bytes, revision: int) -> Compare:
    return Compare(key, Target.MOD, Relation.EQUAL, revision)
