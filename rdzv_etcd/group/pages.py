"""Reads a range of keys page by page, and who the members of a large world are.

So that neither etcd nor the reader has all of a large job in one response.
"""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.clock import Clock
from rdzv_etcd.core.model import Control
from rdzv_etcd.core.rank_slices import assemble
from rdzv_etcd.etcd.api import Etcd, GetResult, KeyValue
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import slices_from
from rdzv_etcd.schema.keys import JobKeys, KeyRange

PAGE_KEYS = 500
"""A presence may have some 5 KiB."""


async def read_pages(
    etcd: Etcd, keys: KeyRange, clock: Clock, timeout_s: float | None = None
) -> GetResult:
    """Read a range; ``timeout_s`` bounds all of it, ``None`` each request by the connection's own.

    What the first page holds is as of the result's revision, the rest as of that or later: whoever
    has watched since then, and applies that, sees each change. Raises EtcdError.
    """
    until_s = None if timeout_s is None else clock.now_s() + timeout_s
    found: list[KeyValue] = []
    rest, revision = keys, 0
    while True:
        left_s = None if until_s is None else max(0.001, until_s - clock.now_s())
        page = await etcd.get(requests.read_page(rest, PAGE_KEYS), timeout_s=left_s)
        revision = revision or page.revision
        found += page.kvs
        if len(page.kvs) < PAGE_KEYS:
            return GetResult(revision, tuple(found), len(found))
        rest = rest.after(page.kvs[-1].key)


async def with_members(
    etcd: Etcd, keys: JobKeys, control: Control, clock: Clock, timeout_s: float | None = None
) -> Control:
    """Name the members of a large world in its record, as that of a small one does. Raises
    EtcdError, StateCorruptError."""
    record = control.round
    if record is None or record.slices is None or record.members:
        return control
    slices = record.slices
    result = await read_pages(etcd, keys.edition(record.number, slices.edition), clock, timeout_s)
    found, _ = slices_from(result, slices.size)
    members, _ = assemble(found, slices.size)
    return replace(control, round=replace(record, members=members))
