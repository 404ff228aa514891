"""What Python prints of this library's errors that nobody catches."""

from __future__ import annotations

from tests.plugin.handlers import run_program
from tests.support.processes import free_port

_CREATE = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv_etcd.torch_plugin.handler import create_handler

create_handler(RendezvousParameters("etcd3", sys.argv[1], "job", 1, 1, connect_timeout=1))
"""


def test_an_error_that_nobody_catches_is_logged_and_has_one_traceback() -> None:
    """And nothing of gRPC's own."""
    done = run_program(_CREATE, f"127.0.0.1:{free_port()}")
    assert done.returncode == 1, done.stderr
    said, begin, *_, last = done.stderr.rstrip().splitlines()
    assert begin.startswith("Traceback")
    assert done.stderr.count("Traceback") == 1
    assert "refused" in last
    assert last.startswith("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: ")
    assert last.endswith(said[said.index("etcd did not answer") :])
