"""One background event-loop thread per process, shared by everything that talks to etcd.

Knows threads, asyncio, signals and forks; knows nothing of etcd or of rendezvous.

The thread is a daemon, so a process that forgets to release it still ends, and it is alive while
``atexit`` callbacks run, so that a node can leave from there. Nothing here uses an executor: those
are shut down before ``atexit`` callbacks run.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rdzv_etcd.errors import ForkedProcessError, MisuseError, RdzvEtcdError, TaskFailedError
from rdzv_etcd.log import LogThread
from rdzv_etcd.process import process_id
from rdzv_etcd.runtime.loop_call import LoopCall, what_interrupted
from rdzv_etcd.runtime.threads import refuse_green_threads, set_from_a_thread

T = TypeVar("T")

_log = logging.getLogger("rdzv_etcd")

CANCEL_GRACE_S = 2.0
"""How long an interrupted or timed-out call waits for its cancelled coroutine to tidy up."""
STOP_GRACE_S = 5.0
"""How long the last release waits for cancelled tasks before it gives them up."""

THREAD_NAME = "rdzv-etcd"


class LoopHold:
    """A counted hold on the process's event-loop thread; thread-safe.

    The first :meth:`acquire` starts the thread, the last :meth:`release` stops it and joins it. A
    forked child starts with none and must acquire its own: a hold inherited from the parent
    refuses to run anything, and releasing it does nothing.
    """

    def __init__(self, thread: _LoopThread) -> None:
        """Use :meth:`acquire`."""
        self._thread = thread
        self._released = False
        self._kept: list[object] = []

    @classmethod
    def acquire(cls) -> LoopHold:
        """Return a new hold, starting the thread if this is the first one. Does not block.

        Raises :class:`~rdzv_etcd.errors.MisuseError` on the loop's own thread, because the caller
        waits for it next, and where gevent or eventlet have replaced threads.
        """
        refuse_green_threads()
        with _state.lock:
            if any(thread.is_current for thread in _threads()):
                raise _own_thread_error()
            if _state.current is None:
                _state.current = _LoopThread()
            _state.current.holds += 1
            return cls(_state.current)

    def release(self) -> None:
        """Give up the hold; idempotent, also after :meth:`release_after`.

        The last one cancels every task, blocks until they have ended (at most about
        ``STOP_GRACE_S``) and joins the thread. Raises :class:`RuntimeError` on the loop's thread.
        """
        thread = self._thread
        if thread.is_foreign:
            return
        if thread.is_current:
            raise RuntimeError("LoopHold.release() was called on the event-loop thread itself")
        if not self._released and self._give_up():
            thread.stop()
        elif not thread.holds:  # and nobody gets another one
            thread.join()
        else:
            thread.log.flush()

    def release_after(
        self,
        last_work: Callable[[], Coroutine[Any, Any, None]],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Run ``last_work`` on the loop and then give up the hold, without waiting for either;
        ``then`` is called when both are done, on the loop's thread as a rule, and must not block.
        If the loop has been stopped only ``then`` is called.

        For finalizers, which run in any thread, the loop's included, in the middle of anything.
        """
        self.begin(self._work_and_release(last_work), then)

    async def _work_and_release(self, last_work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await last_work()
        except RdzvEtcdError as error:
            _log.info("the last work for a released LoopHold failed: %s", error)
        finally:
            if self._give_up():
                self._thread.end()

    def begin(
        self, work: Coroutine[Any, Any, None], then: Callable[[], None] | None = None
    ) -> None:
        """Run ``work`` on the loop, if the hold is not released, and then call ``then``; do not
        wait for either."""
        if not (self._thread.is_foreign or self._released):
            with contextlib.suppress(RuntimeError, TaskFailedError):  # the thread has ended
                self._thread.begin(LoopCall(work, then))
                return
        work.close()
        if then is not None:
            then()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that acquired it."""
        return self._thread.is_foreign

    @property
    def is_current(self) -> bool:
        """Whether this is called on the loop's own thread, which can wait for nothing."""
        return not self._thread.is_foreign and self._thread.is_current

    @property
    def has_failed(self) -> bool:
        """Whether the loop's thread has ended with an error: what was begun is not done."""
        return not self._thread.is_foreign and self._thread.has_failed

    def _give_up(self) -> bool:
        """Give up the hold; return whether it was the thread's last one."""
        thread = self._thread
        with _state.lock:
            if self._released:
                return False
            self._released = True
            self._kept.clear()
            thread.if_it_fails.pop(self, None)
            thread.holds -= 1
            if thread.holds:
                return False
            if _state.current is thread:
                _state.current = None
            if not thread.has_failed:
                _state.ending.add(thread)
            return True

    def if_it_fails(self, callback: Callable[[BaseException], None]) -> None:
        """Call ``callback`` on the loop's thread, with the cause, if the thread ends with an error
        before the hold is released."""
        self._thread.if_it_fails[self] = callback

    def keep(self, user: object) -> None:
        """Keep ``user`` alive as long as this hold, for callers that Python knows nothing of."""
        if not self._released:
            self._kept.append(user)

    def __enter__(self) -> LoopHold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``coro`` on the loop, block until it has ended, return its result or raise its error.

        Raises :class:`TimeoutError` after ``timeout_s``; ``coro`` is cancelled then. If a signal
        handler raises in the waiting thread, ``coro`` is cancelled and given ``CANCEL_GRACE_S`` to
        tidy up before the handler's exception continues. Raises
        :class:`~rdzv_etcd.errors.MisuseError` on the loop's own thread,
        :class:`~rdzv_etcd.errors.TaskFailedError` if that has failed, and :class:`RuntimeError`
        after the release, in a forked child (:class:`~rdzv_etcd.errors.ForkedProcessError`), and if
        the loop thread stops meanwhile.
        """
        thread = self._usable(coro)
        call = LoopCall(coro)
        try:
            thread.begin(call)
            finished = call.wait(timeout_s)
        except BaseException as error:  # from a signal handler: SignalException, KeyboardInterrupt
            thread.cancel(call, what_interrupted(error))
            call.wait(CANCEL_GRACE_S)
            call.log_failure()
            raise
        if not finished:
            thread.cancel(call)
            call.wait(CANCEL_GRACE_S)
            if not call.has_outcome:
                raise TimeoutError(f"not done within {timeout_s} s")
        thread.log.flush()  # what it was about is in the log before what its caller logs next
        return thread.result(call)

    async def call(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run ``coro`` on the loop, await its end on the caller's own, and return its result.

        If the caller is cancelled, so is ``coro``, which gets ``CANCEL_GRACE_S`` to tidy up before
        the cancellation continues. Raises as :meth:`run`.
        """
        thread = self._usable(coro)
        ended, then = set_from_a_thread()
        call = LoopCall(coro, then)
        try:
            thread.begin(call)
            await asyncio.wait({ended})
        except asyncio.CancelledError as error:
            thread.cancel(call, what_interrupted(error))
            await asyncio.wait({ended}, timeout=CANCEL_GRACE_S)
            call.log_failure()
            raise
        except BaseException as error:  # from a signal handler, or the caller was destroyed
            thread.cancel(call, what_interrupted(error))
            raise
        return thread.result(call)

    def _usable(self, coro: Coroutine[Any, Any, object]) -> _LoopThread:
        if self._thread.is_foreign:
            coro.close()
            raise ForkedProcessError(self._thread.pid)
        if self._released:
            coro.close()
            raise RuntimeError("this LoopHold has been released")
        if self._thread.is_current:
            coro.close()
            raise _own_thread_error()
        return self._thread


def _own_thread_error() -> MisuseError:
    return MisuseError(
        f"this call was made on the library's own thread {THREAD_NAME!r}, which does the work that "
        "it waits for: by a __del__ method or a callback. Make it on another thread"
    )


class _LoopThread:
    """The thread, its loop, and the calls under way in it."""

    def __init__(self) -> None:
        self.pid = process_id()
        self.holds = 0
        self.if_it_fails: dict[LoopHold, Callable[[BaseException], None]] = {}
        self._failure: BaseException | None = None
        self.log = LogThread()
        self._loop = asyncio.SelectorEventLoop()  # whatever the program's policy is
        self._calls: set[LoopCall[Any]] = set()
        self._stop_wanted = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        """Done when the loop is to stop."""
        self._thread = threading.Thread(target=self._main, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that owns the thread."""
        return self.pid != process_id()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread  # a number would be used again

    @property
    def has_failed(self) -> bool:
        """Whether it ended, or is about to, with an error."""
        return self._failure is not None

    def begin(self, call: LoopCall[Any]) -> None:
        self._calls.add(call)
        try:
            self._loop.call_soon_threadsafe(self._start, call)
        except RuntimeError as error:  # the loop is closed
            self._calls.discard(call)
            call.coro.close()
            self._check_not_failed()
            raise RuntimeError("the LoopHold has been stopped") from error

    def result(self, call: LoopCall[T]) -> T:
        """Return what the call returned, or raise what it raised, or why it came to nothing."""
        if not call.has_outcome:
            self._check_not_failed()
        return call.result()

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise TaskFailedError("event loop", self._failure) from self._failure

    def cancel(self, call: LoopCall[Any], why: str = "") -> None:
        """Ask the loop to cancel ``call``; harmless if it has ended or never began.

        ``why`` is what :func:`~rdzv_etcd.runtime.loop_call.what_interrupted` returns in it.
        """
        with contextlib.suppress(RuntimeError):  # a closed loop has abandoned all its calls
            self._loop.call_soon_threadsafe(self._cancel, call, why)

    def stop(self) -> None:
        """Cancel what runs, stop the loop, join the thread. A second stop only joins."""
        with _state.lock:
            first, self._stop_wanted = not self._stop_wanted, True
        if first:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the join remains
                self._loop.call_soon_threadsafe(self.end)
        self.join()

    def join(self) -> None:
        """Wait until the thread has ended, as it is about to."""
        self._thread.join()
        self.log.join()

    def end(self) -> None:
        """Stop the loop from its own thread, which ends by itself."""
        if not self._over.done():
            self._over.set_result(None)

    # -- on the loop's thread ---------------------------------------------------------------------

    def _start(self, call: LoopCall[Any]) -> None:
        if self._over.done():
            self._abandon(call)
            return
        call.start(self._loop).add_done_callback(lambda _: self._ended(call))

    def _cancel(self, call: LoopCall[Any], why: str) -> None:
        if not call.interrupt(why):  # it came before _start was scheduled, so it never will be
            self._abandon(call)

    def _ended(self, call: LoopCall[Any]) -> None:
        self._calls.discard(call)
        call.open()

    def _abandon(self, call: LoopCall[Any]) -> None:
        self._calls.discard(call)
        if call.task is None:
            call.coro.close()
        call.open()

    def _main(self) -> None:
        self.log.serve()
        asyncio.set_event_loop(self._loop)
        try:
            self._run_until(self._over)
            self._cancel_tasks()
            self._run_until(self._loop.create_task(self._loop.shutdown_asyncgens()))
        except BaseException as error:  # noqa: BLE001 - it is reported to all holders
            self._fail(error)
        finally:
            asyncio.set_event_loop(None)
            with contextlib.suppress(OSError):  # its descriptors may be what has failed
                self._loop.close()
            _state.ending.discard(self)
            # No caller must wait forever. Late threads still add their calls, so the set must not
            # be iterated over.
            with contextlib.suppress(KeyError):
                while True:
                    self._abandon(self._calls.pop())
            self.log.end()

    def _run_until(self, done: asyncio.Future[Any]) -> None:
        """Run the loop until ``done``, whatever is raised in it or stops it.

        asyncio lets a SystemExit or KeyboardInterrupt end the loop, as it would end a program that
        ran on it. Here they come from a program's callback (its signal handlers run elsewhere) and
        must not end the other work on this loop. The task that raised has failed with it, as with
        any other error, and the loop can continue.
        """
        done.add_done_callback(lambda _: self._loop.stop())
        while not done.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                _log.exception(
                    "%s was raised on the library's own thread %r, by a callback: it ends what it "
                    "was raised in, and neither the thread nor the program",
                    type(error).__name__,
                    THREAD_NAME,
                )

    def _fail(self, error: BaseException) -> None:
        """Report to all holders that this thread ends by itself; later ones get another thread."""
        self._failure = error
        with _state.lock:
            if _state.current is self:
                _state.current = None
        _log.error("the library's own thread %r has failed", THREAD_NAME, exc_info=error)
        for callback in tuple(self.if_it_fails.values()):
            callback(error)

    def _cancel_tasks(self) -> None:
        until_s, pending = self._loop.time() + STOP_GRACE_S, set[asyncio.Task[Any]]()
        while not pending and (tasks := asyncio.all_tasks(self._loop)):
            # One that is cancelled may have begun another, to tidy up.
            for task in tasks:
                task.cancel()
            left_s = max(0.0, until_s - self._loop.time())
            waiting = self._loop.create_task(asyncio.wait(tasks, timeout=left_s))
            self._run_until(waiting)
            _, pending = waiting.result()
        for task in pending:
            _log.error("gave up task %s: it did not end when cancelled", task.get_name())


class _State:
    """The process's loop thread; replaced as a whole in a forked child."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may acquire or release while its own thread is in here.
        self.lock = threading.RLock()
        self.current: _LoopThread | None = None
        self.ending: set[_LoopThread] = set()


_state = _State()
_inherited: list[_State] = []


def _after_fork_in_child() -> None:
    # The parent's loop must not be closed here, and not be garbage collected either: both would
    # remove its descriptors from the epoll set that the child shares with the parent.
    global _state  # noqa: PLW0603 - the one process-wide state, and this its one replacement
    _inherited.append(_state)
    _state = _State()


def _threads() -> set[_LoopThread]:
    """All that have not ended."""
    current = () if _state.current is None else (_state.current,)
    return {*current, *_state.ending}


def _stop_at_exit() -> None:
    """Stop the thread before the interpreter dismantles itself under it.

    ``atexit`` runs last in, first out: whatever was registered after this module was imported
    still finds the loop running.
    """
    with _state.lock:
        threads, _state.current = _threads(), None
    for thread in threads:
        thread.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_stop_at_exit)
