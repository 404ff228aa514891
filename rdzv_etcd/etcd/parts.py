"""Reads and writes of unknown size, in parts that even a slow link carries in time.

etcd does not say how large values are before it sends them, and an attempt whose reply is late is
lost as a whole. So a part asks for as many keys as should fit into :data:`PART_BYTES`, going by the
part before it, and one part follows the other: what has arrived is kept when a later part fails.
Knows keys and sizes, through the port alone. Must not know what the keys mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from rdzv_etcd.etcd.api import Etcd, Get, GetResult, KeyValue

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
        """Note what a part brought; nothing says nothing."""
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

    ``size``: what is known of such values. ``limit_s`` returns the limit of the next request. What
    the first part holds is as of its revision, the others as of that or later: a caller that has
    watched since then, and applies that, sees each change. Raises EtcdError.
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
