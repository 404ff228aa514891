"""Requests of commands that look at jobs from outside.

Each read is of one key, so that no reply grows with a job.
"""

from __future__ import annotations

from urllib.parse import unquote

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd.port import (
    Compare,
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
