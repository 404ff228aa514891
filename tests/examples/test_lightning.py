"""Lightning on a group of its own, and under torchrun."""

from __future__ import annotations

import pytest

from tests.examples.programs import Program, Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORK = "lightning"
LEARNT = r"^rank (\d) of 2: (y = [23]\.\d\dx \+ -[01]\.\d\d)$"


def check_that_both_learnt_the_same(started: list[Program]) -> None:
    found = [program.wait_for(LEARNT) for program in started]
    assert {it[1] for it in found} == {"0", "1"}
    assert len({it[2] for it in found}) == 1
    assert [program.end() for program in started] == [0, 0]


def test_a_trainer_gets_its_place_from_the_group(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str
) -> None:
    command = ("lightning_trainer.py", etcd_server.endpoint, job_id)
    started = [programs.start(*command, python=framework) for _ in range(2)]
    check_that_both_learnt_the_same(started)


def test_a_trainer_under_torchrun_needs_nothing(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={etcd_server.endpoint}"]
    torchrun += [f"--rdzv-id={job_id}", "--rdzv-conf=lease_ttl=3"]
    started = [
        programs.start("lightning_trainer.py", python=framework, launcher=torchrun)
        for _ in range(2)
    ]
    check_that_both_learnt_the_same(started)
