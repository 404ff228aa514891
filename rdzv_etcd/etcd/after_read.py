"""Waiting for puts after a read, without a gap and without delay.

Knows watches and revisions, through the port alone. Must not know what the keys mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdzv_etcd.etcd.api import Etcd, Watch


@asynccontextmanager
async def puts_after(
    etcd: Etcd,
    key: bytes,
    range_end: bytes | None,
    revision: int,
    *,
    catch_up: bool = False,
    tell_resumes: bool = False,
) -> AsyncIterator[tuple[Watch, bool]]:
    """Watch the puts after ``revision``, that of a read; tell whether to read once more.

    etcd lets a watch that has something to catch up wait for it, up to 100 ms
    (:meth:`~rdzv_etcd.etcd.api.Watch.ready`). So this one begins now, and if etcd has written
    anything since ``revision`` the second value is ``True``: what the caller reads now and what the
    watch brings leave no gap. With ``catch_up`` the watch begins right after ``revision``, and the
    value is ``False``. ``tell_resumes``: as of :meth:`~rdzv_etcd.etcd.api.Etcd.watch`. The watch is
    closed in the end. Raises what iterating over it would raise.
    """
    watch = etcd.watch(
        key,
        range_end,
        start_revision=revision + 1 if catch_up else 0,
        puts_only=True,
        tell_resumes=tell_resumes,
    )
    try:
        yield watch, not catch_up and await watch.ready() != revision
    finally:
        await watch.close()
