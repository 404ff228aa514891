"""A job that cannot work ends soon, with one line that says why, and an exit code that is not 0."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.processes import free_port
from tests.support.servers import EtcdServer
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

SOON_S = 90.0
"""Start-up of torchrun on a busy machine plus ``connect_timeout``."""


def test_a_wrong_endpoint(train: Callable[..., Training]) -> None:
    """Also the case of no etcd and no ``embed``."""
    endpoint = f"127.0.0.1:{free_port()}"
    (agent,) = train("1", endpoint=endpoint).start("refused")
    assert agent.wait(SOON_S) != 0
    assert not agent.steps()
    last_line = agent.output.rstrip().rpartition("\n")[2]
    assert re.search(rf"{endpoint}.*refused", last_line), last_line


def test_too_few_open_files(etcd: EtcdServer) -> None:
    """torch's own store would try for five minutes to get a socket."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd.target}", "--no-python"]
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *torchrun, "true"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("raise ulimit -n"), done.stderr
