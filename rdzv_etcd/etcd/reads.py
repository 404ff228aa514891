"""Ways to read over the port: a range in parts that even a slow link carries in time, and the puts
that come after a read.

The size of values is not known before etcd sends them, and an attempt whose reply is late is
lost as a whole. So a part asks for as many keys as should fit into :data:`PART_BYTES`, going by the
part before it, and one part follows the other: what has arrived is kept when a later part fails.
Knows keys, sizes, watches and revisions, through the port alone. Must not know what the keys mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rdzv_etcd.etcd.port import Etcd, Get, GetResult, KeyValue, Watch

PART_BYTES = 512 * 1024
"""Three seconds, the shortest limit of an attempt, at 170 kB/s; a larger value is a part alone."""

_FIRST_KEYS = 64
_GROWTH = 4


class PartSize:
    """How many keys the next part asks for; one object for reads of similar values."""

    def __init__(self) -> None:
        self.keys = _FIRST_KEYS

    def expect(self, size: int) -> None:
        """Note the size of a value that is written where others of its kind will be read."""
        self.keys = min(_FIRST_KEYS, _that_fit(size))

    def note(self, kvs: Sequence[KeyValue]) -> None:
        """Note what a part contained."""
        if kvs:
            mean = sum(len(kv.key) + len(kv.value) for kv in kvs) // len(kvs)
            self.keys = min(_GROWTH * self.keys, _that_fit(mean))


def _that_fit(size: int) -> int:
    return max(1, PART_BYTES // max(1, size))


def own_limit() -> None:
    """The limit of a request that is the connection's own."""


async def read_range(
    etcd: Etcd,
    start: bytes,
    end: bytes,
    *,
    keys_only: bool = False,
    size: PartSize | None = None,
    limit_s: Callable[[], float | None] = own_limit,
) -> AsyncIterator[GetResult]:
    """Yield the keys of ``[start, end)`` in ascending order, a part at a time.

    ``size``: what is known of such values. ``limit_s`` returns the limit of the next request. The
    first part is as of its revision, the others as of that or later: a caller that also applies
    what a watch has delivered since then sees each change. Raises EtcdError.
    """
    size = PartSize() if size is None else size
    while True:
        request = Get(start, end, limit=size.keys, keys_only=keys_only)
        part = await etcd.get(request, timeout_s=limit_s())
        yield part
        if len(part.kvs) < request.limit:
            return
        start = part.kvs[-1].key + b"\x00"
        size.note(part.kvs)


@asynccontextmanager
async def puts_after(
    etcd: Etcd,
    key: bytes,
    range_end: bytes | None,
    revision: int,
    *,
    catch_up: bool = False,
    mark_resumes: bool = False,
) -> AsyncIterator[tuple[Watch, bool]]:
    """Watch the puts after ``revision``, that of a read; yield also whether to read again.

    etcd takes up to 100 ms to deliver what a watch has to catch up
    (:meth:`~rdzv_etcd.etcd.port.Watch.ready`). So this one begins now, and if etcd has written
    anything since ``revision`` the second value is ``True``: between what the caller then reads and
    the watch there is no gap. With ``catch_up`` the watch begins right after ``revision``, and the
    value is ``False``. ``mark_resumes``: see :meth:`~rdzv_etcd.etcd.port.Etcd.watch`. The watch is
    closed in the end. Raises what iterating over it would raise.
    """
    watch = etcd.watch(
        key,
        range_end,
        start_revision=revision + 1 if catch_up else 0,
        puts_only=True,
        mark_resumes=mark_resumes,
    )
    try:
        yield watch, not catch_up and await watch.ready() != revision
    finally:
        await watch.close()
