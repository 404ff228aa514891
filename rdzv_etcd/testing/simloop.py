"""A deterministic asyncio event loop in virtual time, and a clock on it.

When nothing is ready, time jumps to the next timer; ready callbacks run in an order drawn from a
seeded generator, so one seed is one schedule. There are no sockets, threads or signals. Knows
asyncio only, nothing of etcd or rendezvous.

One seed gives one schedule as long as the code under test does not iterate over sets of objects
or strings (run with a fixed ``PYTHONHASHSEED`` if it does), and draws from seeded generators only.

Tested with CPython 3.10 to 3.13: it replaces :class:`asyncio.BaseEventLoop`'s queue, timers and
``_run_once``, and uses the rest as it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rdzv_etcd.clock import wait_for

T = TypeVar("T")
L = TypeVar("L", bound="SimLoop")

WALL_EPOCH_S = 1_700_000_000.0
"""The wall-clock time at which a simulation begins."""

_Timer = tuple[float, int, str, asyncio.TimerHandle]

_NODE: contextvars.ContextVar[str] = contextvars.ContextVar("rdzv_etcd_sim_node", default="")


class SimulationError(Exception):
    """The simulation itself cannot continue, or found an unhandled error."""


class DeadlockError(SimulationError):
    """Nothing is ready and no timer is set: the tasks in the message wait forever."""


class SimulationTimeoutError(SimulationError):
    """The simulated time, or the number of steps, that was allowed has passed."""


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one simulation; use it through :func:`run_simulation`.

    Code that runs inside :meth:`node` (and every task and callback it starts) belongs to that
    node, and is what :meth:`pause` and :meth:`crash` stop.
    """

    def __init__(self, seed: int = 0, *, shuffle: bool = True) -> None:
        super().__init__()
        self.seed = seed
        self.rng = random.Random(f"scenario {seed}")
        """For the scenario's own draws; the schedule's come from another generator."""
        self.steps = 0
        """How many callbacks have run."""
        self.unhandled: list[dict[str, Any]] = []
        """What would have been logged: exceptions that no task retrieved."""
        self._schedule_rng = random.Random(f"schedule {seed}") if shuffle else None
        self._now_s = 0.0
        self._limit_s = float("inf")
        self._ready_now: list[tuple[str, asyncio.Handle]] = []
        self._timers: list[_Timer] = []
        self._cancelled_timers = 0
        self._serial = 0
        self._batch: deque[tuple[str, asyncio.Handle]] = deque()
        """What is being run, in this order."""
        self._stopped: set[str] = set()
        self._held: defaultdict[str, list[tuple[str, asyncio.Handle]]] = defaultdict(list)
        self._task_numbers: weakref.WeakKeyDictionary[asyncio.Task[Any], int]
        self._task_numbers = weakref.WeakKeyDictionary()
        self._failed: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._note_unhandled)

    # -- nodes ------------------------------------------------------------------------------------

    @contextmanager
    def node(self, name: str) -> Iterator[None]:
        """Make everything started inside the block belong to node ``name``."""
        token = _NODE.set(name)
        try:
            yield
        finally:
            _NODE.reset(token)

    def pause(self, name: str) -> None:
        """Run nothing of a node from now on (``SIGSTOP``); time continues."""
        self._stopped.add(name)

    def resume(self, name: str) -> None:
        """Continue a paused node; what became due meanwhile runs now."""
        self._stopped.discard(name)
        if name not in self._halted():
            self._ready_now += self._held.pop(name, [])

    def crash(self, name: str) -> None:
        """Stop a node for good: not even its ``finally`` blocks run before the simulation ends.

        Its messages under way are another matter: cut its link as well.
        """
        self.pause(name)

    def _halted(self) -> set[str]:
        """Return the nodes that do not run now."""
        return self._stopped

    # -- what asyncio calls -----------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]  # typeshed's TypeVarTuple, not to be had in 3.10
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        self._check_open()
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._ready_now.append((context.get(_NODE, ""), handle))
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        context = contextvars.copy_context() if context is None else context
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, context.get(_NODE, ""), timer))
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, _executor: object, func: Callable[..., T], *_args: Any
    ) -> asyncio.Future[T]:
        raise SimulationError(f"a thread was asked for, to run {func!r}: not in a simulation")

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, **options: Any
    ) -> asyncio.Task[T]:
        self._serial += 1
        task = super().create_task(coro, name=name or f"task-{self._serial}", **options)
        self._task_numbers[task] = self._serial
        task.add_done_callback(self._note_failure)
        return task

    def _note_unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(context)

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        # Cycles keep failed tasks from being reported by their destructor at once (3.12 and later).
        if not task.cancelled() and task._exception is not None:
            self._failed.append(task)

    def report_failures(self) -> None:
        """Note every failed task whose exception was not retrieved."""
        for task in self._failed:
            if task._log_traceback:
                self.unhandled.append({"message": task.get_name(), "exception": task.exception()})
        self._failed.clear()

    def close(self) -> None:
        self._ready_now.clear()
        self._batch.clear()
        self._timers.clear()
        self._held.clear()
        super().close()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended, oldest first."""
        return sorted(asyncio.all_tasks(self), key=lambda task: self._task_numbers.get(task, 0))

    # -- running ----------------------------------------------------------------------------------

    def limit(self, limit_s: float) -> None:
        """Raise :class:`SimulationTimeoutError` ``limit_s`` simulated seconds from now."""
        self._limit_s = self._now_s + limit_s

    def release(self) -> None:
        """Continue every paused and crashed node, so that its tasks can be ended."""
        self._stopped.clear()
        for name in list(self._held):
            self.resume(name)

    def _run_once(self) -> None:
        if not self._batch:
            self._next_batch()
        while self._batch:
            node, handle = self._batch.popleft()
            if node in self._halted():
                self._held[node].append((node, handle))
            elif not handle.cancelled():
                self.steps += 1
                handle._run()

    def _next_batch(self) -> None:
        if self._halted():
            self._hold_halted()
        if not self._ready_now:
            self._jump()
        self._take_due_timers()
        batch, self._ready_now = self._ready_now, []
        if len(batch) > 1 and self._schedule_rng is not None:
            self._schedule_rng.shuffle(batch)
        self._batch.extend(batch)

    def _hold_halted(self) -> None:
        halted = self._halted()
        ready, self._ready_now = self._ready_now, []
        for entry in ready:
            (self._held[entry[0]] if entry[0] in halted else self._ready_now).append(entry)

    def _jump(self) -> None:
        """Advance time to the next timer."""
        while self._timers and self._timers[0][3].cancelled():
            heapq.heappop(self._timers)
            self._cancelled_timers = max(0, self._cancelled_timers - 1)
        if not self._timers:
            if self._stopping:  # type: ignore[attr-defined]
                return
            raise DeadlockError(f"deadlock at {self._now_s:.3f} s: {self._waiting()}")
        self._now_s = max(self._now_s, self._timers[0][0])
        if self._now_s > self._limit_s:
            raise SimulationTimeoutError(f"not done after {self._limit_s:.3f} s: {self._waiting()}")

    def _take_due_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._now_s:
            _, _, node, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._ready_now.append((node, timer))

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        """Clear out cancelled timers once they are the majority, as asyncio does."""
        self._cancelled_timers += 1
        if self._cancelled_timers > 100 and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[3].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    def _waiting(self) -> str:
        lines = [f"seed {self.seed}, {self.steps} steps, tasks still waiting:"]
        lines += [f"  {task.get_name()}: {_where(task)}" for task in self.tasks()]
        if self._stopped:
            lines.append(f"  paused or crashed: {', '.join(sorted(self._stopped))}")
        return "\n".join(lines)


class SimClock:
    """One node's clock in a simulation; implements :class:`rdzv_etcd.clock.Clock`.

    ``offset_s`` shifts the monotonic clock (its zero has no meaning anyway; see :meth:`jump`);
    ``wall_skew_s`` is how far the wall clock is off, and may be changed at any time.
    """

    def __init__(
        self,
        loop: SimLoop,
        *,
        offset_s: float = 0.0,
        wall_skew_s: float = 0.0,
        seed: object = 0,
    ) -> None:
        self.wall_skew_s = wall_skew_s
        self._loop = loop
        self._offset_s = offset_s
        self._random = random.Random(f"clock {loop.seed} {seed}")

    def now_s(self) -> float:
        return self._loop.time() + self._offset_s

    def wall_s(self) -> float:
        return WALL_EPOCH_S + self._loop.time() + self.wall_skew_s

    def jitter(self, upto_s: float) -> float:
        return self._random.random() * upto_s

    def jump(self, ahead_s: float) -> None:
        """Let the monotonic clock jump ahead. Waits that have begun are not shortened."""
        if ahead_s < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-ahead_s} s")
        self._offset_s += ahead_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        return await wait_for(awaitable, timeout_s)


def run_simulation(
    scenario: Callable[[SimLoop], Coroutine[Any, Any, T]],
    seed: int = 0,
    *,
    limit_s: float = 86_400.0,
    shuffle: bool = True,
) -> T:
    """Run ``scenario(loop)`` on a loop of its own and return what it returns.

    Afterwards all remaining tasks, those of crashed nodes too, are cancelled and awaited. Raises
    the scenario's exception; :class:`DeadlockError`, :class:`SimulationTimeoutError` after
    ``limit_s`` simulated seconds; :class:`SimulationError` if a task's failure was not retrieved.
    """
    return run_on(SimLoop(seed, shuffle=shuffle), scenario, limit_s)


def run_on(loop: L, scenario: Callable[[L], Coroutine[Any, Any, T]], limit_s: float) -> T:
    """Do what :func:`run_simulation` does on a loop of the caller's, and close it."""
    try:
        loop.limit(limit_s)
        try:
            result = loop.run_until_complete(scenario(loop))
        finally:
            loop.limit(limit_s)
            _end_tasks(loop)
    finally:
        loop.close()
    if loop.unhandled:
        raise _unhandled(loop)
    return result


def _end_tasks(loop: SimLoop) -> None:
    tasks = loop.tasks()
    for task in tasks:
        task.cancel()
    loop.release()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.report_failures()


def _unhandled(loop: SimLoop) -> SimulationError:
    first = loop.unhandled[0]
    error = SimulationError(
        f"seed {loop.seed}: {len(loop.unhandled)} unhandled errors; the first: "
        f"{first.get('message')}: {first.get('exception')!r}"
    )
    error.__cause__ = first.get("exception")
    return error


def _where(task: asyncio.Task[Any]) -> str:
    """Return the innermost place where a task is suspended."""
    coro: Any = task.get_coro()
    place = getattr(coro, "__qualname__", repr(coro))
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "ag_frame", None)
        if frame is not None:
            place = f"{coro.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "ag_await", None)
    return place
