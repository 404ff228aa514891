"""What cannot work ends soon, with one line that says why, and an exit code that is not 0."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.certificates import make_certificates
from tests.support.processes import free_port
from tests.support.servers import USER, EtcdBinary, EtcdServer
from tests.torchrun.agents import QUICK, Agent, Agents, Job

pytestmark = pytest.mark.torchrun

SOON_S = 90.0
"""Start-up of torchrun on a busy machine plus ``connect_timeout``."""


def refused(agents: Agents, job: Job, expected: str, **environment: str) -> None:
    """Assert that torchrun fails, and that the last line it prints matches ``expected``."""
    (agent,) = agents.start(job, "refused", **environment)
    assert agent.wait(SOON_S) != 0
    assert not agent.steps()
    assert re.search(expected, last_line(agent)), last_line(agent)


def last_line(agent: Agent) -> str:
    return agent.output.rstrip().rpartition("\n")[2]


@pytest.mark.slow
def test_wrong_endpoint(agents: Agents, tmp_path: Path) -> None:
    """Also the case of no etcd and no ``embed``."""
    endpoint = f"127.0.0.1:{free_port()}"
    refused(agents, Job(endpoint, tmp_path, nnodes="1"), rf"{endpoint}.*refused")


@pytest.mark.slow
def test_no_endpoint(agents: Agents, tmp_path: Path) -> None:
    """Without ``--rdzv-endpoint`` it is etcd's default port on this machine."""
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", 2379)) == 0:
            pytest.skip("something listens on localhost:2379")
    refused(agents, Job("", tmp_path, nnodes="1"), r"localhost:2379.*refused")


@pytest.mark.slow
def test_misspelt_key(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    job = Job(etcd.target, tmp_path, nnodes="1", conf="leese_ttl=3")
    refused(agents, job, "leese_ttl.*lease_ttl")


@pytest.mark.slow
@pytest.mark.parametrize("run_id", ["team/job", "j" * 250], ids=["slash", "long"])
def test_a_job_id_that_torch_cannot_name_its_log_folder_after(
    etcd: EtcdServer, agents: Agents, tmp_path: Path, run_id: str
) -> None:
    job = Job(etcd.target, tmp_path, nnodes="1", run_id=run_id)
    refused(agents, job, "torch cannot create its log folder.*give a.*--rdzv-id")
    assert not etcd.keys()


@pytest.mark.slow
def test_min_above_max(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """torchrun itself refuses this, before the backend is asked."""
    refused(agents, Job(etcd.target, tmp_path, nnodes="3:2"), "min.*max|AssertionError|3:2")


@pytest.mark.slow
def test_too_few_open_files(etcd: EtcdServer) -> None:
    """torch's own store would try for five minutes to get a socket."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd.target}", "--no-python"]
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "bash", *torchrun, "true"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("raise ulimit -n"), done.stderr


@pytest.mark.slow
def test_wrong_password(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    etcd.enable_auth()
    refused(
        agents,
        Job(etcd.target, tmp_path, nnodes="1"),
        "user|password",
        RDZV_ETCD_USER=USER,
        RDZV_ETCD_PASSWORD="not the password",
    )


@pytest.mark.slow
def test_wrong_ca(etcd_binary: EtcdBinary, agents: Agents, tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "certificates")
    server = EtcdServer(etcd_binary, tmp_path, certificates=files).start_on_free_ports()
    try:
        job = Job(server.endpoint, tmp_path, nnodes="1", conf=f"{QUICK},ca_cert={files.foreign_ca}")
        refused(agents, job, "(?i)certificate")
    finally:
        server.stop()
