"""Log lines of one thread, written on another."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd import log as log_module
from rdzv_etcd.log import LINES_KEPT, THREAD_NAME, LogThread

LIMIT_S = 60.0
LOG = logging.getLogger("rdzv_etcd")


class Written(logging.Handler):
    """Keeps what was written and on which thread; may be blocked, or told to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.threads: set[str] = set()
        self.raised: BaseException | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_inside = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_inside.set()
        assert self.may_go_on.wait(LIMIT_S)
        self.threads.add(threading.current_thread().name)
        self.lines.append(record.getMessage())
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised


@pytest.fixture
def written() -> Iterator[Written]:
    handler = Written()
    LOG.addHandler(handler)
    try:
        yield handler
    finally:
        handler.may_go_on.set()
        LOG.removeHandler(handler)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogThread]:
    monkeypatch.setattr(log_module, "FLUSH_S", LIMIT_S)  # a slow machine writes 10,000 lines, too
    made = LogThread()
    yield made
    made.end()
    made.join()
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def on_it(lines: LogThread) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Does something on the thread whose lines are written on another one."""
    with ThreadPoolExecutor(1, initializer=lines.serve) as pool:
        yield lambda work: pool.submit(work).result(LIMIT_S)


Served = Callable[[Callable[[], None]], None]


def warn(first: int, count: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(first, first + count):
            LOG.warning("line %d", number)

    return work


def expected(first: int, count: int) -> list[str]:
    return [f"line {number}" for number in range(first, first + count)]


def test_lines_are_written_in_order_and_on_the_log_thread(
    lines: LogThread, written: Written, on_it: Served
) -> None:
    on_it(lambda: None)
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]
    on_it(warn(0, 100))
    lines.flush()
    assert written.lines == expected(0, 100)
    assert written.threads == {THREAD_NAME}


def test_lines_of_other_threads_are_written_there(written: Written, on_it: Served) -> None:
    on_it(lambda: None)
    LOG.warning("mine")
    assert written.threads == {threading.current_thread().name}


def test_the_thread_goes_on_while_a_handler_blocks_and_what_is_dropped_is_counted(
    lines: LogThread, written: Written, on_it: Served
) -> None:
    written.may_go_on.clear()
    on_it(warn(0, LINES_KEPT + 17))
    written.may_go_on.set()
    lines.flush()
    on_it(warn(LINES_KEPT + 17, 1))
    lines.flush()
    *before, dropped, after = written.lines
    assert before == expected(0, LINES_KEPT)
    assert dropped.startswith("17 log lines were dropped")
    assert [after] == expected(LINES_KEPT + 17, 1)


def test_dropped_lines_are_counted_at_the_end_at_the_latest(
    lines: LogThread, written: Written, on_it: Served
) -> None:
    written.may_go_on.clear()
    on_it(warn(0, LINES_KEPT + 1))
    lines.end()
    written.may_go_on.set()
    lines.join()
    assert written.lines[-1].startswith("1 log line was dropped")


def test_a_flush_waits_for_a_blocked_handler_once(
    lines: LogThread, written: Written, on_it: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.may_go_on.clear()
    on_it(warn(0, 1))
    monkeypatch.setattr(log_module, "FLUSH_S", 0.01)
    lines.flush()
    monkeypatch.setattr(log_module, "FLUSH_S", 10 * LIMIT_S)
    lines.flush()  # it would not return
    assert written.lines == []
    on_it(warn(1, 1))
    written.may_go_on.set()
    lines.end()
    lines.join()
    assert written.lines == expected(0, 2)


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_handler_raises_is_reported_as_logging_does_it(
    lines: LogThread,
    written: Written,
    on_it: Served,
    raised: type[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    written.raised = raised("by the handler")
    on_it(warn(0, 2))
    lines.flush()
    assert written.lines == expected(0, 2)
    told = capsys.readouterr().err
    assert told.count("--- Logging error ---") == 1
    assert f"{raised.__name__}: by the handler" in told


def test_a_handler_may_flush(lines: LogThread, written: Written, on_it: Served) -> None:
    """It may call what flushes, and would wait for itself."""

    class Flushing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.flush()

    flushing = Flushing()
    LOG.addHandler(flushing)
    try:
        on_it(warn(0, 2))
        lines.flush()
    finally:
        LOG.removeHandler(flushing)
    assert written.lines == expected(0, 2)


def test_every_logger_that_the_library_s_thread_may_use_is_known() -> None:
    """Those of an embedded etcd's start and of secrets are used on the program's threads only."""
    package = Path(rdzv_etcd.__file__).parent
    own_names = {
        ".".join(("rdzv_etcd", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if "getLogger(__name__)" in path.read_text("utf-8")
        and path.relative_to(package).parts[0] not in ("embedded", "settings")
    }
    assert own_names <= set(log_module._LOGGERS)


def test_a_forked_child_writes_its_own_lines() -> None:
    program = textwrap.dedent(
        """
        import logging, os, sys
        from rdzv_etcd.log import LogThread
        logging.basicConfig(format="%(message)s")
        LogThread().serve()
        log = logging.getLogger("rdzv_etcd")
        log.warning("of the parent")
        child = os.fork()
        if not child:
            log.warning("of the child")
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert sorted(done.stderr.splitlines()) == ["of the child", "of the parent"]
