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
    """What the tests' filter and handler raise."""


def fail(record: logging.LogRecord) -> bool:
    if threading.current_thread().name == THREAD_NAME:
        raise BrokenFilterError(record.getMessage())
    return True


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fail(record)


@pytest.mark.parametrize("where", ["handler", "filter"])
def test_a_node_goes_on_although_its_logging_fails(
    leak_check: LeakCheck,
    etcd_server: EtcdServer,
    job_id: str,
    where: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told once, on standard error."""
    monkeypatch.setattr(log_errors, "_told", set())
    log, handler = logging.getLogger("rdzv_etcd"), BrokenHandler()
    log.setLevel(logging.INFO)
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        worlds = join_all(nodes)
        if where == "handler":
            log.addHandler(handler)
        else:
            log.addFilter(fail)
        try:
            nodes[1].leave("has to go")
            assert worlds[0].wait_over(LIMIT_S)
            assert worlds[0].change == Left({nodes[1].node_id: "has to go"})
            assert nodes[0].join().size == 1
        finally:
            log.removeHandler(handler)
            log.removeFilter(fail)
    assert capsys.readouterr().err.count("a logging handler or filter raised") == 1
