"""Reads and watches what etcd holds of a job, in pages; writes nothing.

Knows which reads there are, and how many of them are too many. Must not know what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Etcd, Get, GetResult, LeaseLeft
from rdzv_etcd.names import Names
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.node.slices import with_members
from rdzv_etcd.node.views import read_pages
from rdzv_etcd.protocol import inspect_requests as requests
from rdzv_etcd.protocol.describe import names_in
from rdzv_etcd.protocol.job_state import JobState, asked_to_leave, is_gone, job_state
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Control, Drain, Nodes
from rdzv_etcd.protocol.views import control_from, nodes_from
from rdzv_etcd.settings import Settings

SHOWN_NODES = 500
"""Of a larger job only numbers are shown, unless all of its nodes are asked for."""
_ASKED_LEASES = 64
"""One request each."""
_AT_ONCE = 8
_TRIES = 3


@dataclass(frozen=True)
class Job:
    """A job as it was read."""

    keys: JobKeys
    control: Control
    """With the members of a large world named, if all nodes were read."""
    nodes: Nodes
    """Empty if there are too many to look at."""
    count: int
    """How many presences there are."""
    leases: Mapping[str, int] = field(default_factory=dict)
    """The lease of each presence, by node id."""
    left: Mapping[str, LeaseLeft] = field(default_factory=dict)
    """What is known of them, by node id."""
    formed_at: int = 0
    """etcd's revision when the last round was formed of which it has an audit; 0: there is none, or
    there is a record, which holds more."""

    @cached_property
    def is_gone(self) -> bool:
        """Whether its last run is over though nobody closed it."""
        return not self.count and is_gone(self.control, self.nodes, self.formed_at)

    @cached_property
    def state(self) -> JobState:
        """What it is, as far as its nodes were looked at."""
        return job_state(self.job, self.control, self.nodes)

    @cached_property
    def names(self) -> Names:
        """How its nodes are named."""
        return names_in(self.control, self.nodes)

    @property
    def job(self) -> str:
        return self.keys.job_id

    @property
    def is_complete(self) -> bool:
        """Whether all presences were looked at."""
        return len(self.leases) + len(self.nodes.unreadable) >= self.count

    @property
    def drains(self) -> Mapping[str, Drain]:
        """The nodes that are asked to leave, as far as it is known that they are there."""
        if not self.is_complete:
            return self.control.drains
        return asked_to_leave(self.control, self.nodes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded for it."""
        control = self.control
        known = control.round or control.leader or control.ended or self.count
        return not (known or self.is_gone)


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[EtcdClient]:
    """A client that has reached etcd. Raises EtcdError within ``connect_timeout_s``."""
    client = EtcdClient(settings.connection)
    try:
        await client.connect()
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def watching(etcd: Etcd, keys: JobKeys, timeout_s: float) -> AsyncIterator[JobWatch]:
    """The events of a job from now on, and before them what it is. Raises EtcdError,
    StateCorruptError."""
    events = JobWatch(etcd, keys, SystemClock())
    await events.open(timeout_s)
    try:
        yield events
    finally:
        await events.close()


async def read_job(
    etcd: Etcd, keys: JobKeys, *, every_node: bool = False, closely: bool = False
) -> Job:
    """Read a job: its control keys and, unless there are too many, its presences.

    The reads are repeated a few times if a round was closed between them. ``closely``: ask also
    when nodes were heard of last, if there are not too many. Raises EtcdError, StateCorruptError.
    """
    for _ in range(_TRIES):
        control = control_from(keys, await etcd.get(keys.control.read()))
        view = await _read_nodes(etcd, keys, control, every_node=every_node)
        again = control_from(keys, await etcd.get(keys.control.read()))
        if again.round_revision == control.round_revision:
            break
    if view.is_complete:
        again = await with_members(etcd, keys, again)
    view = replace(view, control=again)
    if again.round is None and not view.count:
        audits = (await read_pages(etcd, keys.audits, keys_only=True)).kvs
        view = replace(view, formed_at=max((kv.mod_revision for kv in audits), default=0))
    if closely and len(view.leases) <= _ASKED_LEASES:
        view = replace(view, left=await _left(etcd, view.leases))
    return view


async def _read_nodes(etcd: Etcd, keys: JobKeys, control: Control, *, every_node: bool) -> Job:
    count = (await etcd.get(keys.nodes.read(count_only=True))).count
    if count > SHOWN_NODES and not every_node:
        return Job(keys, control, Nodes(control.revision), count)
    kvs = (await read_pages(etcd, keys.nodes)).kvs
    nodes = nodes_from(keys, GetResult(control.revision, kvs, len(kvs)), 0.0)
    leases = {
        node_id: kv.lease_id
        for kv in kvs
        if (node_id := keys.node_id(kv.key)) not in nodes.unreadable
    }
    return Job(keys, control, nodes, len(kvs), leases)


async def _left(etcd: Etcd, leases: Mapping[str, int]) -> dict[str, LeaseLeft]:
    """Leave out what cannot be read: a user that may read a key may not see its lease."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(lease_id: int) -> LeaseLeft | None:
        async with slots:
            try:
                return await etcd.time_to_live(lease_id)
            except EtcdError:
                return None

    answers = await asyncio.gather(*map(ask, leases.values()))
    asked = zip(leases, answers, strict=True)
    return {node_id: answer for node_id, answer in asked if answer is not None}


async def jobs_under(etcd: Etcd, prefix: str, most: int) -> tuple[list[str], bool]:
    """Return the ids of jobs that have keys, and whether these are all; one small read for each.

    Raises EtcdError.
    """
    jobs: list[str] = []
    keys = requests.under(prefix)
    while len(jobs) < most:
        key = await _first(etcd, keys.read(limit=1, keys_only=True))
        if key is None:
            return jobs, True
        job = requests.job_of(prefix, key)
        if job is not None:
            jobs.append(job)
        keys = requests.beyond(prefix, key)
    return jobs, False


async def _first(etcd: Etcd, request: Get) -> bytes | None:
    got = await etcd.get(request)
    return got.kvs[0].key if got.kvs else None
