"""Requests of whoever looks at jobs from outside, or clears up after them.

Reads come in pages, so that no reply grows with a job; what deletes is guarded by nobody being
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd.api import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Put,
    Relation,
    Target,
    Txn,
    prefix_end,
)
from rdzv_etcd.schema.keys import JobKeys, KeyRange

KEYS_PER_TXN = 40
"""Each of them takes a guard and a deletion; see :data:`rdzv_etcd.etcd.api.OPS_PER_TXN`."""
_PARTS_OF_A_JOB = frozenset({b"audit", b"barrier", b"ctl", b"gate", b"nodes", b"ranks", b"store"})


def page(keys: KeyRange, limit: int, *, keys_only: bool = False) -> Get:
    """Read the first keys of a range; ``keys.after(...)`` is what comes next."""
    return Get(keys.start, keys.end, limit=limit, keys_only=keys_only)


def everything() -> KeyRange:
    """All keys of an etcd, whoever wrote them."""
    return KeyRange(b"\x00", b"\x00")


def under(prefix: str) -> KeyRange:
    """All keys of all jobs under a prefix."""
    start = f"{prefix.rstrip('/')}/".encode(errors="surrogateescape")
    return KeyRange(start, prefix_end(start))


def job_of(prefix: str, key: bytes) -> str | None:
    """Return the id of the job that a key under the prefix belongs to; ``None``: to none."""
    start = under(prefix).start
    segment, slash, _ = key[len(start) :].partition(b"/")
    try:
        job = unquote(segment.decode(), errors="surrogatepass")
        root = JobKeys(prefix, job).root
    except (UnicodeError, SettingsError):
        return None
    return job if slash and root == start + segment + slash else None


def beyond(prefix: str, key: bytes) -> KeyRange:
    """What of the keys under the prefix comes after all those of the key's job."""
    rest = under(prefix)
    segment, slash, _ = key[len(rest.start) :].partition(b"/")
    if not slash:
        return rest.after(key)
    return KeyRange(prefix_end(rest.start + segment + slash), rest.end)


def place_of(keys: JobKeys, key: bytes) -> str | None:
    """Return the prefix under which a key is one of a job of this id, if it is."""
    parts = key.split(b"/")
    at = _job_in(parts)
    if at is None or parts[at] != keys.root.split(b"/")[-2]:
        return None
    return b"/".join(parts[:at]).decode(errors="replace")


def beside(key: bytes) -> KeyRange:
    """What comes after all keys of the same job, or, of another application, after all that begin
    as this one does, up to its third slash."""
    parts = key.split(b"/")
    at = _job_in(parts)
    head = parts[: 3 if at is None else at + 1]
    if len(head) == len(parts):
        return everything().after(key)
    return KeyRange(prefix_end(b"/".join(head) + b"/"), everything().end)


def _job_in(parts: Sequence[bytes]) -> int | None:
    """Which segment of a key's path names a job, if it looks like one of ours."""
    places = (at for at in range(1, len(parts) - 2) if parts[at + 1] in _PARTS_OF_A_JOB)
    return next(places, None)


def may_write(keys: JobKeys) -> Txn:
    """Ask whether this user may do what a node does, and whether there is room; writes nothing.

    etcd looks at the permissions, and at the room, of both branches before it looks at the guard,
    and no key has a negative version.
    """
    key = keys.node("doctor")
    never = Compare(key, Target.VERSION, Relation.LESS, 0)
    return Txn((never,), (Put(key, b""), Put(keys.round, b"")))


def remove_all(keys: JobKeys, *, force: bool) -> Txn:
    """Delete all keys of a job; without ``force`` only if no node is there."""
    guards = () if force else (_nobody_there(keys),)
    everything_of_it = Delete(keys.all.start, keys.all.end)
    return Txn(guards, (everything_of_it,), (page(keys.nodes, 1, keys_only=True),))


def remove_leftovers(keys: JobKeys, leftovers: Sequence[KeyValue]) -> Txn:
    """Delete keys that no lease will remove, if they are as they were read and the job is still
    over."""
    same = (
        guard
        for kv in leftovers
        for guard in (Compare(kv.key, Target.MOD, Relation.EQUAL, kv.mod_revision),)
    )
    guards = (
        _nobody_there(keys),
        Compare(keys.round, Target.LEASE, Relation.EQUAL, 0),
        Compare(keys.leader, Target.LEASE, Relation.EQUAL, 0),
        *same,
    )
    return Txn(guards, tuple(Delete(kv.key) for kv in leftovers))


def _nobody_there(keys: JobKeys) -> Compare:
    """A node's presence is on its lease; what has none there was put by a stranger."""
    return Compare(keys.nodes.start, Target.LEASE, Relation.EQUAL, 0, keys.nodes.end)
