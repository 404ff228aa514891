"""A job that cannot work ends soon, with one line that says why, and an exit code that is not 0."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.certificates import make_certificates
from tests.support.processes import free_port
from tests.support.servers import USER, EtcdBinary, EtcdServer
from tests.torchrun.agents import QUICK, Agent
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

SOON_S = 90.0
"""Start-up of torchrun on a busy machine plus ``connect_timeout``."""


def refused(job: Training, expected: str, **environment: str) -> None:
    """Assert that torchrun fails, and that the last line it prints matches ``expected``."""
    (agent,) = job.start("refused", **environment)
    assert agent.wait(SOON_S) != 0
    assert not agent.steps()
    assert re.search(expected, last_line(agent)), last_line(agent)


def last_line(agent: Agent) -> str:
    return agent.output.rstrip().rpartition("\n")[2]


def test_wrong_endpoint(train: Callable[..., Training]) -> None:
    """Also the case of no etcd and no ``embed``."""
    endpoint = f"127.0.0.1:{free_port()}"
    refused(train("1", endpoint=endpoint), rf"{endpoint}.*refused")


@pytest.mark.release
def test_no_endpoint(train: Callable[..., Training]) -> None:
    """Without ``--rdzv-endpoint`` it is etcd's default port on this machine."""
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", 2379)) == 0:
            pytest.skip("something listens on localhost:2379")
    refused(train("1", endpoint=""), r"localhost:2379.*refused")


def test_a_misspelt_key(etcd: EtcdServer, train: Callable[..., Training]) -> None:
    refused(train("1", conf="leese_ttl=3"), "leese_ttl.*lease_ttl")
    assert not etcd.keys()


@pytest.mark.parametrize(
    "run_id",
    ["team/job", pytest.param("j" * 250, marks=pytest.mark.release)],
    ids=["slash", "long"],
)
def test_a_job_id_that_torch_cannot_name_its_log_folder_after(
    etcd: EtcdServer, train: Callable[..., Training], run_id: str
) -> None:
    expected = "torch cannot create its log folder.*give a.*--rdzv-id"
    refused(train("1", run_id=run_id), expected)
    assert not etcd.keys()


def test_too_few_open_files(etcd: EtcdServer) -> None:
    """torch's own store would try for five minutes to get a socket."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd.target}", "--no-python"]
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *torchrun, "true"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("raise ulimit -n"), done.stderr


def test_wrong_password(etcd: EtcdServer, train: Callable[..., Training]) -> None:
    etcd.enable_auth()
    login = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": "not the password"}
    refused(train("1"), "user|password", **login)


def test_wrong_ca(etcd_binary: EtcdBinary, train: Callable[..., Training], tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    server = EtcdServer(etcd_binary, tmp_path, name="tls", certificates=files)
    try:
        server.start_on_free_ports()
        conf = f"{QUICK},ca_cert={files.foreign_ca}"
        refused(train("1", endpoint=server.endpoint, conf=conf), "(?i)certificate")
    finally:
        server.stop()
