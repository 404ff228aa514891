"""Watches a whole job for one reader, and keeps for it what has happened until it asks.

Reads etcd and writes nothing. :mod:`rdzv_etcd.protocol.events` decides what happened. The reader
may be as slow as it likes: it gets the number of events that it missed, and the state by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import cast

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdPermissionError, RdzvEtcdError
from rdzv_etcd.etcd.port import Etcd, GetResult, WatchBatch
from rdzv_etcd.names import is_unknown
from rdzv_etcd.node.slices import with_members
from rdzv_etcd.node.views import ViewWatch, read_pages, within
from rdzv_etcd.node.waiting import Tasks, Wakeup
from rdzv_etcd.protocol.events import (
    JobEvent,
    JobView,
    Missed,
    Snapshot,
    happened,
    view_after,
)
from rdzv_etcd.protocol.job_state import JobState, job_state
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Control, Nodes, Round
from rdzv_etcd.protocol.views import control_after, control_from, nodes_after, nodes_from
from rdzv_etcd.text import LINE, shown

_log = logging.getLogger("rdzv_etcd")

EVENTS_KEPT = 10_000
"""How many events wait for the reader before some are dropped."""
_UNSURE_S = 5.0
"""A reader is warned when it has not been shown for so long after the time for it that its view is
up to date."""
_VIEWS_KEPT = 16
"""How many views wait while the members of a large world are read; if there are more, only the last
one is compared with the present."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the watch has brought."""

    control: Control
    nodes: Nodes
    touched: frozenset[str] | None
    """The nodes of which it brought anything; ``None``: any."""
    at_s: float
    wall_s: float


class JobWatch:
    """The events of one job, for one reader. :meth:`open` it, ask for the :meth:`next`, and
    :meth:`close` it; on one event loop."""

    def __init__(
        self, etcd: Etcd, keys: JobKeys, clock: Clock, *, events_kept: int = EVENTS_KEPT
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._clock = clock
        self._wakeup = Wakeup(clock)
        self._events_kept = events_kept
        self._events: deque[JobEvent] = deque()
        self._missed = 0
        """How many events were dropped since the reader last got their number."""
        self._waiting: deque[_Seen] = deque()
        """What was seen since :attr:`_view`."""
        self._view: JobView | None = None
        """The job as of the last event."""
        self._named: Round | None = None
        """The last world of which all members are known."""
        self._warned = ""
        """The last warning of why the view is an old one."""
        self._opening = asyncio.Lock()
        self._tasks = Tasks()
        self._failure: BaseException | None = None
        self._closed = False
        self._watch: ViewWatch[_Seen] = ViewWatch(
            etcd,
            clock,
            self._wakeup,
            request=keys.watched.read(),
            in_parts=True,
            build=self._read,
            fold=self._changed,
            notice=self._note,
        )

    # -- what the reader asks ---------------------------------------------------------------------

    async def open(self, timeout_s: float | None = None) -> None:
        """Begin to watch. The first event is a :class:`~rdzv_etcd.protocol.events.Snapshot`.

        Idempotent. Raises EtcdError, StateCorruptError.
        """
        async with self._opening:
            if self._view is None and not self._closed:
                await self._open(timeout_s)

    async def _open(self, timeout_s: float | None) -> None:
        try:
            await self._watch.open(timeout_s)
            last = self._waiting.pop()
            self._waiting.clear()
            self._view = await self._view_of(last)
        except BaseException:
            await self._watch.close()
            raise
        if self._closed:  # meanwhile
            await self._watch.close()
            return
        self._events.append(self._snapshot(self._view))
        self._etcd.watch_health.listeners.append(self._wakeup.notify)
        for work in (self._watch.run(), self._decide()):
            self._tasks.start(work, self._fail)

    async def next(self, timeout_s: float | None = None) -> JobEvent | None:
        """Return the next event; ``None`` if there is none within ``timeout_s``, or after the end.

        Raises what this watch has failed with.
        """
        until_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        while not self._events and not self._missed:
            if self._failure is not None:
                raise self._failure
            if self._closed or not await self._wakeup.wait(until_s, when=self._has_news):
                return None
        if self._events:
            return self._events.popleft()
        missed, self._missed = self._missed, 0
        self._events.append(self._snapshot(cast(JobView, self._view)))
        return replace(Missed(missed), at_s=self._clock.now_s(), wall_s=self._clock.wall_s())

    def give_back(self, event: JobEvent) -> None:
        """Let an event be the next one again: the call that took it was interrupted."""
        if self._closed:
            return
        if self._missed:  # it came before those that were dropped since
            self._missed += event.count if isinstance(event, Missed) else 1
        else:
            self._events.appendleft(event)
        self._wakeup.notify()

    @property
    def is_closed(self) -> bool:
        """Whether there will be nothing more."""
        return self._closed

    def end(self) -> None:
        """Note, in any thread, that no more events are wanted; :meth:`close` follows."""
        self._closed = True

    async def close(self) -> None:
        """Stop watching; a reader that waits in :meth:`next` gets ``None``. Idempotent."""
        self._closed = True
        await self._tasks.stop()
        await self._watch.close()
        with contextlib.suppress(ValueError):  # it never began, or was closed before
            self._etcd.watch_health.listeners.remove(self._wakeup.notify)
        self._events.clear()
        self._missed = 0
        self._wakeup.notify()

    def _has_news(self) -> bool:
        is_over = self._closed or self._failure is not None
        return bool(self._events) or self._missed > 0 or is_over

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._wakeup.notify()

    # -- views ------------------------------------------------------------------------------------

    def _read(self, result: GetResult) -> _Seen:
        before = self._watch.seen
        now_s = self._clock.now_s()
        nodes = None if before is None else before.nodes
        return self._now(*job_from(self._keys, result, now_s, nodes))

    def _changed(self, seen: _Seen, batch: WatchBatch) -> _Seen:
        keys, now_s = self._keys, self._clock.now_s()
        control_keys, node_keys = keys.control, keys.nodes
        control = [event for event in batch.events if event.kv.key in control_keys]
        nodes = [event for event in batch.events if event.kv.key in node_keys]
        return self._now(
            control_after(keys, seen.control, batch.revision, control),
            nodes_after(keys, seen.nodes, batch.revision, nodes, now_s) if nodes else seen.nodes,
            frozenset(keys.node_id(event.kv.key) for event in nodes),
        )

    def _now(self, control: Control, nodes: Nodes, touched: frozenset[str] | None = None) -> _Seen:
        return _Seen(control, nodes, touched, self._clock.now_s(), self._clock.wall_s())

    def _note(self, seen: _Seen) -> None:
        self._waiting.append(seen)
        if len(self._waiting) > _VIEWS_KEPT:
            self._waiting.clear()
            self._waiting.append(replace(seen, touched=None))

    async def _decide(self) -> None:
        """Find what happened from view to view, until cancelled."""
        while True:
            await self._wakeup.wait(when=self._has_work)
            self._report_problem()
            while self._waiting:
                before = cast(JobView, self._view)
                view = await self._view_of(self._waiting.popleft())
                self._view = view
                self._keep(happened(before, view))

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._problem() != self._warned

    async def _view_of(self, seen: _Seen) -> JobView:
        control = seen.control
        named = self._named
        if named is not None and named.same_world(control.formed) and control.round is not None:
            control = replace(control, round=replace(control.round, members=named.members))
        elif control.formed is not None:
            try:
                control = await with_members(self._etcd, self._keys, control)
            except RdzvEtcdError as error:
                self._warn(f"does not know the members of round {control.epoch}: {error}")
            else:
                formed = control.formed
                is_known = formed is not None and not any(map(is_unknown, formed.members))
                self._named = formed if is_known else None
        return view_after(
            self._view,
            control,
            seen.nodes,
            at_s=seen.at_s,
            wall_s=seen.wall_s,
            touched=seen.touched,
        )

    def _keep(self, events: list[JobEvent]) -> None:
        if not events:
            return
        if self._missed or len(self._events) + len(events) > self._events_kept:
            self._missed += len(self._events) + len(events)
            self._events.clear()
        else:
            self._events += events
        self._wakeup.notify()

    def _snapshot(self, view: JobView) -> Snapshot:
        state = job_state(self._keys.job_id, view.control, view.nodes)
        return replace(Snapshot(state), at_s=view.at_s, wall_s=view.wall_s)

    # -- trouble ----------------------------------------------------------------------------------

    def _problem(self) -> str:
        if self._watch.problem is not None:
            return str(self._watch.problem)
        health = self._etcd.watch_health
        is_unsure = health.problem is not None and health.unsure_s > _UNSURE_S
        return "etcd does not show whether anything has changed since" if is_unsure else ""

    def _report_problem(self) -> None:
        problem = self._problem()
        if problem and problem != self._warned:
            self._warn(f"uses what was read before: {problem}")
        elif self._warned and not problem:
            self._warn("is up to date again")
        self._warned = problem

    def _warn(self, text: str) -> None:
        _log.warning("%s", shown(f"[{self._keys.job_id}] watching the job: {text}", LINE))


def job_from(
    keys: JobKeys, result: GetResult, now_s: float, before: Nodes | None = None
) -> tuple[Control, Nodes]:
    """Read control and presences from what is under ``keys.watched``. Raises StateCorruptError."""
    control, nodes = keys.control, keys.nodes
    of_control = tuple(kv for kv in result.kvs if kv.key in control)
    of_nodes = tuple(kv for kv in result.kvs if kv.key in nodes)
    return (
        control_from(keys, replace(result, kvs=of_control)),
        nodes_from(keys, replace(result, kvs=of_nodes), now_s, before),
    )


async def read_state(
    etcd: Etcd, keys: JobKeys, clock: Clock, timeout_s: float | None = None
) -> JobState:
    """Read what a job is, and how long its lease has left. Raises EtcdError, StateCorruptError."""
    limit_s = within(clock, timeout_s)
    result = await read_pages(etcd, keys.watched, limit_s=limit_s)
    control, nodes = job_from(keys, result, clock.now_s())
    control = await with_members(etcd, keys, control, limit_s)
    return job_state(keys.job_id, control, nodes, await _left_s(etcd, control, timeout_s))


async def _left_s(etcd: Etcd, control: Control, timeout_s: float | None) -> float | None:
    if control.round is None:
        return None
    with contextlib.suppress(EtcdPermissionError):  # perhaps it may only read the keys
        left = await etcd.time_to_live(control.round.job_lease, timeout_s=timeout_s)
        return 0.0 if left is None else float(left.left_s)
    return None
