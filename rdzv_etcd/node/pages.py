"""Reads a range of keys in parts, and who the members of a large world are.

So that neither etcd nor the reader has all of a large job in one response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rdzv_etcd.clock import Clock
from rdzv_etcd.etcd.port import Etcd, GetResult
from rdzv_etcd.etcd.reads import own_limit, read_range
from rdzv_etcd.etcd.retry import Deadline
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.model import Control
from rdzv_etcd.protocol.slices import assemble
from rdzv_etcd.protocol.views import slices_from


async def read_pages(
    etcd: Etcd,
    keys: KeyRange,
    *,
    keys_only: bool = False,
    limit_s: Callable[[], float | None] = own_limit,
) -> GetResult:
    """Read a range as :func:`~rdzv_etcd.etcd.reads.read_range`; the revision is the first part's.

    Raises EtcdError.
    """
    reading = read_range(etcd, keys.start, keys.end, keys_only=keys_only, limit_s=limit_s)
    parts = [part async for part in reading]
    found = tuple(kv for part in parts for kv in part.kvs)
    return replace(parts[0], kvs=found)


def within(clock: Clock, timeout_s: float | None) -> Callable[[], float | None]:
    """Return the limits of requests that are done within so many seconds from now, all together."""
    return own_limit if timeout_s is None else Deadline(clock, timeout_s).remaining_s


async def with_members(
    etcd: Etcd, keys: JobKeys, control: Control, limit_s: Callable[[], float | None] = own_limit
) -> Control:
    """Name the members of a large world in its record, as that of a small one does. Raises
    EtcdError, StateCorruptError."""
    record = control.round
    if record is None or record.slices is None or record.members:
        return control
    slices = record.slices
    result = await read_pages(etcd, keys.edition(record.number, slices.edition), limit_s=limit_s)
    found, _ = slices_from(result, slices.size)
    members, _ = assemble(found, slices.size)
    return replace(control, round=replace(record, members=members))
