"""A program's logging handlers and filters that raise, block, or call the library."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from rdzv_etcd import Left
from rdzv_etcd.log import THREAD_NAME
from tests.library.nodes import LIMIT_S, Job, RemoteNode, at_once, groups, wait_until

LOG = logging.getLogger("rdzv_etcd")


class EachLine(logging.Handler):
    """Does something with each line of the library's thread; also a filter."""

    def __init__(self, act: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread().name == THREAD_NAME:
            self._act(record)

    def as_filter(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True


@contextmanager
def each_line(where: str, act: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Have ``act`` called with each line of the library's thread, by a handler or a filter."""
    lines, level = EachLine(act), LOG.level
    LOG.setLevel(logging.INFO)
    if where == "handler":
        LOG.addHandler(lines)
    else:
        LOG.addFilter(lines.as_filter)
    try:
        yield
    finally:
        LOG.removeHandler(lines)
        LOG.removeFilter(lines.as_filter)
        LOG.setLevel(level)


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["handler", "filter"])
def test_a_node_goes_on_although_its_logging_fails(
    job: Job, where: str, raised: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: logging.LogRecord) -> None:
        raise raised("by the program")

    with job.worlds(2, "1:2") as (nodes, worlds), each_line(where, fail):
        nodes[1].leave("has to go")
        assert worlds[0].wait_over(LIMIT_S)
        assert worlds[0].change == Left({nodes[1].node_id: "has to go"})
        assert nodes[0].join().size == 1
    assert f"{raised.__name__}: by the program" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["handler", "filter"])
def test_a_node_goes_on_although_its_logging_blocks(job: Job, where: str) -> None:
    may_go_on, lines = threading.Event(), list[str]()

    def block(record: logging.LogRecord) -> None:
        assert may_go_on.wait(LIMIT_S)
        lines.append(record.getMessage())

    with each_line(where, block):
        with job.worlds(2, "1:2") as (nodes, worlds):
            nodes[1].leave("has to go")
            assert worlds[0].wait_over(LIMIT_S)
            assert nodes[0].join().size == 1
            nodes[0].leave()
        assert lines == []
        may_go_on.set()
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(LIMIT_S)
    assert [line for line in lines if "has to go" in line]


def test_a_handler_may_call_the_library(job: Job) -> None:
    """Also what blocks: the lines are not written on the thread that does the work."""
    counts = list[int]()
    with job.worlds(2, "1:2") as (nodes, worlds):

        def count(record: logging.LogRecord) -> None:
            counts.append(worlds[0].store.add("lines", 1))

        with each_line("handler", count):
            nodes[1].leave("has to go")
            wait_until("a line", lambda: counts)


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """The reading and the writing end of a pipe that takes nothing more."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"\n" * 512)
    except BlockingIOError:
        os.set_blocking(writing, True)
    yield reading, writing
    os.close(writing)
    os.close(reading)


def test_a_member_whose_standard_error_nobody_reads_takes_part_in_the_next_world(
    job: Job, full_pipe: tuple[int, int]
) -> None:
    reading, writing = full_pipe
    settings = job.settings("2")
    with RemoteNode(job.options("2"), log=writing) as remote:
        with groups(settings, 1) as (here,):
            at_once([partial(remote.call, "join"), here.join])
            here.leave("has to go")
        assert remote.call("wait_over", LIMIT_S)
        with groups(settings, 1) as (here,):
            at_once([partial(remote.call, "join"), here.join])
            read = b""
            while b"has to go" not in read:
                read += os.read(reading, 4096)
            here.leave()
        remote.finish()
