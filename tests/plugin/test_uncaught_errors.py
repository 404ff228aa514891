"""What Python prints of this library's errors that nobody catches."""

from __future__ import annotations

import pytest

from tests.plugin.handlers import run_program
from tests.support.processes import free_port

_PROGRAM = """
import logging, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv_etcd.torch_plugin.handler import create_handler
def create(**config):
    return create_handler(RendezvousParameters("etcd3", {endpoint!r}, "job", 1, 1, **config))
{end}
"""


def _printed(end: str, *, debug: bool = False) -> str:
    """What a program prints that ends with an error."""
    endpoint = f"127.0.0.1:{free_port()}"
    level = "logging.getLogger('rdzv_etcd').setLevel('DEBUG')\n" if debug else ""
    done = run_program(_PROGRAM.format(endpoint=endpoint, end=level + end))
    assert done.returncode == 1
    return done.stderr.rstrip()


_REFUSED = "create(connect_timeout=1)"


def test_an_error_that_nobody_catches_is_one_line_below_the_log_s() -> None:
    """Without any of gRPC's own."""
    said, last = _printed(_REFUSED).splitlines()
    assert "refused" in last
    assert last.startswith("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: ")
    assert last.endswith(said[said.index("etcd did not answer") :])


@pytest.mark.slow
def test_so_is_a_bad_setting() -> None:
    assert "Traceback" not in _printed("create(leese_ttl=3)")


@pytest.mark.slow
def test_at_log_level_debug_the_traceback_is_there() -> None:
    assert "Traceback" in _printed(_REFUSED, debug=True)


@pytest.mark.slow
def test_other_errors_keep_their_traceback() -> None:
    end = f"try:\n    {_REFUSED}\nexcept Exception as error:\n    raise KeyError('mine') from error"
    printed = _printed(end)
    assert printed.count("Traceback") == 2
    assert printed.endswith("KeyError: 'mine'")


@pytest.mark.slow
def test_a_program_s_own_hook_is_left_alone() -> None:
    hook = "sys.excepthook = lambda *_: print('my own', file=sys.stderr)"
    assert _printed(f"{hook}\n{_REFUSED}").endswith("my own")
