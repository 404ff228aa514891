"""Requests of commands that look at jobs from outside, or clear up after them.

Each read is of one key, so that no reply grows with a job; each delete is guarded by the absence of
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd.port import (
    OPS_PER_TXN,
    Compare,
    Delete,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    prefix_end,
)
from rdzv_etcd.protocol.keys import JobKeys, KeyRange


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
    """Return the keys under the prefix that come after all those of the key's job."""
    rest = under(prefix)
    segment, slash, _ = key[len(rest.start) :].partition(b"/")
    if not slash:
        return rest.after(key)
    return KeyRange(prefix_end(rest.start + segment + slash), rest.end)


def may_write(keys: JobKeys) -> Txn:
    """Ask whether this user may write as a node does, and whether there is room; writes nothing.

    etcd looks at the permissions, and at the room, of both branches before it looks at the guard,
    and no key has a negative version.
    """
    key = keys.node("doctor")
    never = Compare(key, Target.VERSION, Relation.LESS, 0)
    return Txn((never,), (Put(key, b""), Put(keys.round, b"")))


def remove_job(keys: JobKeys, found: Sequence[bytes], *, force: bool) -> list[Txn]:
    """Delete a job's keys, of which ``found`` were read; without ``force`` only if no node is
    there. Keys below the job's root that are no part of it stay."""
    guards = () if force else (_nobody_there(keys),)
    ranges = keys.per_round
    ops: list[Op] = [each.delete() for each in ranges]
    ops += [
        Delete(key) for key in found if keys.owns(key) and not any(key in each for each in ranges)
    ]
    steps = [ops[at : at + OPS_PER_TXN] for at in range(0, len(ops), OPS_PER_TXN)]
    return [Txn(guards, tuple(step), (keys.nodes.read(limit=1, keys_only=True),)) for step in steps]


def _nobody_there(keys: JobKeys) -> Compare:
    """No node is there: a presence is on its node's lease, and a foreign key there has none."""
    return Compare(keys.nodes.start, Target.LEASE, Relation.EQUAL, 0, keys.nodes.end)
