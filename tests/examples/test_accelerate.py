"""Accelerate under torchrun, and through ``accelerate launch``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.programs import Program, Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORK = "accelerate"


def check_that_all_agree(started: list[Program]) -> None:
    found = [it.wait_for(r"^rank (\d) of 2: all have the same weight: True") for it in started]
    assert {it[1] for it in found} == {"0", "1"}
    assert [program.end() for program in started] == [0, 0]


def test_under_torchrun(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str, tmp_path: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd_server.endpoint}"]
    torchrun += [f"--rdzv-id={job_id}", "--rdzv-conf=lease_ttl=3"]
    started = [
        programs.start(
            "accelerate_script.py",
            "--cpu",
            python=framework,
            launcher=torchrun,
            HF_HOME=str(tmp_path),  # else it would read this user's settings
        )
        for _ in range(2)
    ]
    check_that_all_agree(started)


def test_accelerate_launch_hands_the_backend_on(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str, tmp_path: Path
) -> None:
    host, _, port = etcd_server.target.rpartition(":")
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launch += ["--num_machines=2", "--num_processes=2", "--machine_rank=1"]
    launch += ["--rdzv_backend=etcd3", f"--main_process_ip={host}", f"--main_process_port={port}"]
    started = [
        programs.start(
            "accelerate_script.py",
            "--cpu",
            python=framework,
            launcher=launch,
            HF_HOME=str(tmp_path),
            PET_RDZV_ID=job_id,
            PET_RDZV_CONF="lease_ttl=3",
        )
        for _ in range(2)
    ]
    check_that_all_agree(started)
    assert etcd_server.keys(f"/rdzv_etcd/{job_id}/".encode())  # the job had the name it was given
