"""Every request of a world's barriers and exchanges. No I/O here.

Each member has a *mark* under each name: a key that only it puts, with each of its writes there,
and guarded by the mark's revision as it last knew it. Of all copies of its requests one at most is
therefore applied, and one that comes late does nothing. The key that shows that all have given is
guarded in the same way by its own revision.
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
from rdzv_etcd.protocol.requests import is_at

_MAX_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Seen:
    """The state under one name, as one member has read it."""

    revision: int
    mark: KeyValue | None
    """That of the member that reads."""
    done: KeyValue | None
    count: int
    """How many members have given in the turn that was read."""
    ranks: frozenset[int]
    """The ranks of those members, if they were read."""
    own: frozenset[int]
    """The turns in which the member that reads has given, of that one and the one before, if they
    were read."""

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
    """Give ``data`` in ``turn`` and delete this member's data of two turns before, if its mark is
    of the revision ``mark`` and the round's ``record`` is the world's.

    Either way :func:`seen_in` returns the state, and by this member's mark :func:`gives` detects
    that an earlier copy of this was applied."""
    forgotten = (Delete(keys.given(turn - 2, rank)),) if turn > 2 else ()
    return Txn(
        (is_at(keys.mark(rank), mark), record),
        (
            Put(keys.mark(rank), _gives(turn), job_lease),
            Put(keys.given(turn, rank), data, job_lease),
            *forgotten,
            *_look(keys, rank, turn),
        ),
        _look(keys, rank, turn),
    )


def take_back(keys: CollectiveKeys, rank: int, turn: int, job_lease: int, seen: Seen) -> Txn:
    """Take back this member's data of ``turn``, given or about to be given, if its mark is as it
    was ``seen`` and no member has given anything since: a later count does not include it."""
    given = keys.all_given(turn)
    return Txn(
        (
            is_at(keys.mark(rank), seen.mark_revision),
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
    """Announce that all have given in ``turn``, if ``done`` is still the last announcement and the
    round's record is the world's; otherwise :func:`done_in` returns that announcement."""
    return Txn(
        (is_at(keys.done, 0 if done is None else done.mod_revision), record),
        (Put(keys.done, b"%d" % turn, job_lease),),
        (read_done(keys),),
    )


def look(keys: CollectiveKeys, rank: int, turn: int, *, names: bool) -> Txn:
    """Read the state of ``turn``, and whether this member has given in it and in the one before;
    ``names``: also which members have."""
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
    """Return the state that :func:`give` or :func:`look` has read."""
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
    """Return the last announcement, from a refused :func:`announce`."""
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
