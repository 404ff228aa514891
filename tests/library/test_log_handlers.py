"""A program's logging handlers and filters that fail on the library's thread."""

from __future__ import annotations

import logging
import threading

import pytest

from rdzv_etcd import Left, log_errors
from rdzv_etcd.group.loop_thread import THREAD_NAME
from tests.library.nodes import LIMIT_S, groups, join_all, node_settings
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


class BrokenFilterError(Exception):
    """What the tests' filter and handler raise, as a rule."""


class BrokenFilter(logging.Filter):
    def __init__(self, raised: type[BaseException]) -> None:
        super().__init__()
        self.raised = raised

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.current_thread().name == THREAD_NAME:
            raise self.raised(record.getMessage())
        return True


class BrokenHandler(logging.Handler):
    def __init__(self, broken: BrokenFilter) -> None:
        super().__init__()
        self.broken = broken

    def emit(self, record: logging.LogRecord) -> None:
        self.broken.filter(record)


@pytest.mark.parametrize("raised", [BrokenFilterError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["handler", "filter"])
def test_a_node_goes_on_although_its_logging_fails(
    leak_check: LeakCheck,
    etcd_server: EtcdServer,
    job_id: str,
    where: str,
    raised: type[BaseException],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told once, on standard error."""
    monkeypatch.setattr(log_errors, "_told", set())
    broken = BrokenFilter(raised)
    log, handler = logging.getLogger("rdzv_etcd"), BrokenHandler(broken)
    log.setLevel(logging.INFO)
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        worlds = join_all(nodes)
        if where == "handler":
            log.addHandler(handler)
        else:
            log.addFilter(broken)
        try:
            nodes[1].leave("has to go")
            assert worlds[0].wait_over(LIMIT_S)
            assert worlds[0].change == Left({nodes[1].node_id: "has to go"})
            assert nodes[0].join().size == 1
        finally:
            log.removeHandler(handler)
            log.removeFilter(broken)
    assert capsys.readouterr().err.count("a logging handler or filter raised") == 1


def test_what_ends_a_program_goes_on_in_its_main_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There it may be what a signal's handler raised."""
    with pytest.raises(KeyboardInterrupt), log_errors.errors_only_told:
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
