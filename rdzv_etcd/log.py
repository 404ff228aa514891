"""Write this library's log lines on a thread of their own, those about a wait when they are due.

A logging handler may block for minutes: a pipe is not read, a terminal was stopped with Ctrl-S,
a log driver is slow. The thread that renews a node's lease must not wait for that.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from rdzv_etcd.process import Latch, begun_in_thread, process_id, wait_for_result

LINES_KEPT = 1000
"""At most this many lines wait to be written; further ones are dropped and counted."""
FLUSH_S = 1.0
"""How long a caller waits at most until the lines before its own are written."""

THREAD_NAME = "rdzv-etcd log"

_LOGGERS = ("rdzv_etcd", "rdzv_etcd.etcd.first_contact", "asyncio")
"""Those through which the library's thread logs."""

_here = threading.local()
_unfinished: set[LogThread] = set()
_reporter = logging.NullHandler()


class LogThread:
    """Writes what is logged on the thread that calls :meth:`serve`; starts with the first line.

    The lines are written in their order, as if they were logged on that thread. A handler or filter
    that raises is reported as :mod:`logging` reports its own (``logging.raiseExceptions``).
    """

    def __init__(self) -> None:
        self._process = process_id()
        # Its put() neither blocks nor takes a lock that an interrupted thread could keep.
        self._queue: SimpleQueue[logging.LogRecord | Latch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_flush: Latch | None = None
        # Each number has one writer: the served thread, or the log thread.
        self._taken = 0
        self._dropped = 0
        self._written = 0
        self._reported = 0

    # -- on the served thread ---------------------------------------------------------------------

    def serve(self) -> None:
        """From now on, write what is logged on the calling thread."""
        for name in _LOGGERS:
            filters = logging.getLogger(name).filters
            if _take not in filters:
                filters.insert(0, _take)  # before those of the program, which may block or raise
        _here.log_thread = self

    def take(self, record: logging.LogRecord) -> bool:
        """Take a line, unless this process is a forked child, which has no such thread."""
        if self._process != process_id():
            return False
        if self._taken - self._written >= LINES_KEPT:
            self._dropped += 1
            return True
        self._taken += 1
        self._queue.put(record)
        if self._thread is None:
            self._start()
        return True

    def end(self) -> None:
        """Let the log thread end once all is written. Does not block."""
        self._queue.put(None)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write, name=THREAD_NAME, daemon=True)
        _unfinished.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads: tried again with the next line
            self._thread = None

    # -- on other threads -------------------------------------------------------------------------

    def flush(self) -> None:
        """Block until the lines so far are written, for at most ``FLUSH_S``; not at all while an
        earlier call's lines are not, because a handler is blocked then."""
        if self._written == self._taken or not self._can_wait():
            return
        if self._last_flush is None or self._last_flush.is_open:
            self._last_flush = latch = Latch()
            self._queue.put(latch)
            latch.wait(FLUSH_S)

    def join(self) -> None:
        """After :meth:`end`: block until all is written, for at most ``FLUSH_S``."""
        if self._thread is not None and self._can_wait():
            self._thread.join(FLUSH_S)

    def _can_wait(self) -> bool:
        return self._process == process_id() and threading.current_thread() is not self._thread

    # -- on the log thread ------------------------------------------------------------------------

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            latch = item if isinstance(item, Latch) else None
            if not isinstance(item, Latch):
                _handle(item)
                self._written += 1
            del item  # its traceback keeps what its frames have
            unreported = self._dropped - self._reported
            if unreported and (latch or self._queue.empty() or unreported >= LINES_KEPT):
                self._report(unreported)
            if latch is not None:
                latch.open()
        if self._dropped > self._reported:
            self._report(self._dropped - self._reported)
        _unfinished.discard(self)

    def _report(self, count: int) -> None:
        self._reported += count
        lines = "1 log line was" if count == 1 else f"{count} log lines were"
        text = f"{lines} dropped: the log did not take {LINES_KEPT} earlier ones in time"
        place = (logging.WARNING, __file__, 0, text, (), None)
        _handle(logging.getLogger(_LOGGERS[0]).makeRecord(_LOGGERS[0], *place))


def _take(record: logging.LogRecord) -> bool:
    """A filter of the loggers: ``False`` if this thread's lines are written on another one."""
    log_thread: LogThread | None = getattr(_here, "log_thread", None)
    return log_thread is None or not log_thread.take(record)


def _handle(record: logging.LogRecord) -> None:
    try:
        logging.getLogger(record.name).handle(record)
    except BaseException:  # noqa: BLE001 - the program's own handler, and this thread only writes
        with contextlib.suppress(Exception):  # standard error may be closed, or blocked, too
            _reporter.handleError(record)


def _at_exit() -> None:
    for log_thread in tuple(_unfinished):
        log_thread.join()


atexit.register(_at_exit)


# --- waits ---------------------------------------------------------------------------------------

_FIRST_S = (10.0, 30.0, 60.0)
_THEN_EVERY_S = 300.0


class LineTimes:
    """When the lines about one wait are due: soon, and then ever more rarely."""

    def __init__(self) -> None:
        self._logged = 0

    @property
    def any_logged(self) -> bool:
        return self._logged > 0

    @property
    def next_s(self) -> float:
        """How long after the beginning of the wait the next one is due."""
        logged = self._logged  # another thread may log
        more = logged - len(_FIRST_S)
        return _FIRST_S[logged] if more < 0 else _FIRST_S[-1] + _THEN_EVERY_S * (more + 1)

    def is_due(self, waited_s: float) -> bool:
        """Whether one is to be logged now; then it counts as logged."""
        if waited_s < self.next_s:
            return False
        self.note(waited_s)
        return True

    def note(self, waited_s: float) -> None:
        """Note that one was logged. If the node was stopped for a while, it stands for several."""
        self._logged += 1
        while self.next_s <= waited_s:
            self._logged += 1


T = TypeVar("T")


class TookTooLongError(Exception):
    """What was watched is not done within its limit. Never leaves this package."""


def watched(
    work: Callable[[], T], report: Callable[[float], None], name: str, limit_s: float = math.inf
) -> T:
    """Do ``work``, which a resolver or a file system may block for as long as it likes, in a thread
    of that ``name``; call ``report`` with the seconds waited whenever a line is due.

    Signal handlers run while this blocks. Raises what ``work`` raises, and
    :class:`TookTooLongError` after ``limit_s``; the thread goes on then. Where no thread can be
    started, ``work`` is done here, without all that.
    """
    began_s, lines = time.monotonic(), LineTimes()
    try:
        outcome = begun_in_thread(work, name)
    except RuntimeError:  # there are too many threads
        return work()
    while not wait_for_result(outcome, began_s + min(lines.next_s, limit_s) - time.monotonic()):
        waited_s = time.monotonic() - began_s
        if lines.is_due(waited_s):
            report(waited_s)
        if waited_s >= limit_s:
            raise TookTooLongError
    return outcome.result()
