"""What Python prints of this library's errors that nobody catches."""

from __future__ import annotations

import pytest

from tests.plugin.handlers import run_program
from tests.support.processes import free_port

_CREATE = """
import logging, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv_etcd.torch_plugin.handler import create_handler

def create(**config):
    config.setdefault("connect_timeout", 1)
    create_handler(RendezvousParameters("etcd3", sys.argv[1], "job", 1, 1, **config))
"""
_OTHERS = """
def shown(begin, fail):
    print("begin", begin, file=sys.stderr)
    try:
        fail()
    except Exception:
        sys.excepthook(*sys.exc_info())

def another():
    try:
        create()
    except Exception as error:
        raise KeyError("mine") from error

shown("a bad setting", lambda: create(leese_ttl=3))
shown("another error", another)
logging.getLogger("rdzv_etcd").setLevel("DEBUG")
shown("at level DEBUG", create)
sys.excepthook = lambda *_: print("my own", file=sys.stderr)
shown("its own hook", create)
"""


def _printed(program: str, code: int) -> str:
    done = run_program(program, f"127.0.0.1:{free_port()}")
    assert done.returncode == code, done.stderr
    return done.stderr.rstrip()


def test_an_error_that_nobody_catches_is_one_line_below_the_log_s() -> None:
    """Without any of gRPC's own."""
    said, last = _printed(f"{_CREATE}create()", 1).splitlines()
    assert "refused" in last
    assert last.startswith("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: ")
    assert last.endswith(said[said.index("etcd did not answer") :])


@pytest.mark.slow
def test_only_this_library_s_errors_have_no_traceback() -> None:
    """They have one at log level DEBUG; and a program's own hook is left alone."""
    _, *shown = _printed(_CREATE + _OTHERS, 0).split("begin ")
    bad_setting, another, at_debug, own_hook = shown
    assert "leese_ttl" in bad_setting
    assert "Traceback" not in bad_setting
    assert another.count("Traceback") == 2
    assert another.rstrip().endswith("KeyError: 'mine'")
    assert "Traceback" in at_debug
    assert "Traceback" not in own_hook
    assert own_hook.endswith("\nmy own")
