"""Participants on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TypeVar

from rdzv_etcd.aio.observer import JobEvents
from rdzv_etcd.aio.world import World
from rdzv_etcd.errors import DrainedError, JobClosedError
from rdzv_etcd.process import begun_in_thread, refuse_after_fork
from rdzv_etcd.protocol.model import Closure
from rdzv_etcd.runtime.loop_thread import refuse_green_threads, told_from_a_thread
from rdzv_etcd.world import group as blocking
from rdzv_etcd.world.world import WorldMember

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what blocks for a moment in a thread of its own: those of the event loop may all be taken.

    If the caller is cancelled meanwhile, undo it when it is done, be that after the end of the
    caller's event loop; the interpreter does not wait for it. ``undo`` must not block. A forked
    child is refused here.
    """
    refuse_after_fork()
    refuse_green_threads()
    made: list[T] = []
    abandoned = threading.Event()

    def undo_it() -> None:
        with contextlib.suppress(IndexError):  # the other thread has done it
            undo(made.pop())

    def do_it() -> T:
        result = work()
        made.append(result)
        if abandoned.is_set():
            undo_it()
        return result

    try:
        return await asyncio.wrap_future(begun_in_thread(do_it, "rdzv-etcd start"))
    except asyncio.CancelledError:
        abandoned.set()
        undo_it()
        raise


class Group:
    """One participant of one job, as :class:`rdzv_etcd.Group`; :func:`connect` makes one.

    Its methods may be awaited on any event loop, :meth:`join` only when no other call of it is
    under way.
    """

    def __init__(self, group: blocking.Group) -> None:
        """Use ``group`` from asyncio; it may be used in both ways at the same time."""
        self._group = group

    @property
    def job(self) -> str:
        """The job's id."""
        return self._group.job

    @property
    def node_id(self) -> str:
        """This node's id, ``<host>~<pid>~<random>``: names the process, not only the host."""
        return self._group.node_id

    async def worlds(self) -> AsyncIterator[World]:
        """As :meth:`rdzv_etcd.Group.worlds`, for ``async for``."""
        while True:
            try:
                world = await self.join()
            except JobClosedError as error:
                if error.succeeded and not error.is_refused:
                    return
                raise
            except DrainedError:
                return
            yield world

    async def join(self, timeout_s: float | None = None, *, because: str = "") -> World:
        """As :meth:`rdzv_etcd.Group.join`. If this is cancelled, the node takes its arrival back,
        and may join again."""
        group, part = self._group, self._group._part
        bound = None
        if part.bound is None and not part.has_ended:
            bound = await in_thread(group._bind, lambda listener: listener.close())
        try:
            with group._one_join(bound) as listener:
                await self._pass_gate()
                seat = await part.call(group._arrive(listener, timeout_s, because))
                return World(group._enter(listener, seat))
        except DrainedError as error:
            await self.leave(group._note_drained(error))
            raise

    async def _pass_gate(self) -> None:
        gate, part = self._group._gate, self._group._part
        if not gate.begin():
            return
        with part.node.call_ins.awaited():
            try:
                failure = await in_thread(gate.ask, lambda _: None)
            except asyncio.CancelledError:
                gate.abandon()
                raise
        await part.call(gate.settle(failure))

    def drain(self, reason: str = "no reason given") -> None:
        """As :meth:`rdzv_etcd.Group.drain`: does not wait."""
        self._group.drain(reason)

    @property
    def drain_reason(self) -> str | None:
        """As :attr:`rdzv_etcd.Group.drain_reason`: from memory."""
        return self._group.drain_reason

    def waiting_count(self) -> int:
        """As :meth:`rdzv_etcd.Group.waiting_count`: from memory."""
        return self._group.waiting_count()

    def closure(self) -> Closure | None:
        """As :meth:`rdzv_etcd.Group.closure`: from memory."""
        return self._group.closure()

    def events(self) -> JobEvents:
        """As :meth:`rdzv_etcd.Group.events`, for ``async for``; it begins when it is first asked,
        or with ``async with``."""
        return JobEvents(self._group._events())

    async def report_dead(
        self, member: WorldMember | str, evidence: str, *, certain: bool = False
    ) -> bool:
        """As :meth:`rdzv_etcd.Group.report_dead`."""
        work = self._group._report_dead(member, evidence, certain=certain)
        return await self._group._part.call(work)

    async def finish(self, reason: str = "the work is done") -> bool:
        """As :meth:`rdzv_etcd.Group.finish`."""
        return await self._end(reason, succeeded=True, force=False)

    async def fail(self, reason: str, *, force: bool = False) -> bool:
        """As :meth:`rdzv_etcd.Group.fail`."""
        return await self._end(reason, succeeded=False, force=force)

    async def _end(self, reason: str, *, succeeded: bool, force: bool) -> bool:
        work = self._group._end_it(reason, succeeded=succeeded, force=force)
        return await self._group._part.call(work)

    async def leave(self, reason: str = "left") -> None:
        """As :meth:`rdzv_etcd.Group.leave`. If this is cancelled, the node leaves all the same."""
        if self._group._part.is_foreign:  # a forked child has nothing to end, and no event loop
            return
        left, tell = told_from_a_thread()
        if self._group._begin_to_leave(reason, tell):
            await left

    def when_left(self, callback: Callable[[], None]) -> None:
        """As :meth:`rdzv_etcd.Group.when_left`: called on the library's thread, not on this loop's.
        Does not block."""
        self._group.when_left(callback)

    @property
    def has_left(self) -> bool:
        """As :attr:`rdzv_etcd.Group.has_left`: from memory."""
        return self._group.has_left

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.leave(blocking.reason_after(kind))
