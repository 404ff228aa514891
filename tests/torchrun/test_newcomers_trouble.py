"""A node that cannot start its workers leaves; a job that works without it goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from rdzv_etcd.world_change import left
from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agents, Job
from tests.torchrun.in_etcd import finish

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.mark.parametrize("trouble", ["no program", "a file that cannot be made"])
def test_a_newcomer_that_cannot_start_its_workers_does_not_end_the_job(
    etcd: EtcdServer, agents: Agents, tmp_path: Path, trouble: str
) -> None:
    """The others were asked to take it in, and form a world without it when it has gone."""
    job = Job(etcd.target, tmp_path, nnodes="1:3", max_restarts=0)
    (healthy,) = agents.start(job, "healthy")
    agents.wait_for_world([healthy], size=1)
    began_at = time.time()
    environment = {}
    if trouble == "no program":
        no_python = (*job.launcher, "--no-python")
        broken = replace(job, launcher=no_python, script=Path("/no/such/program"))
    else:
        broken = replace(job, script_args=())
        environment["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
        environment["TORCHELASTIC_TIMER_FILE"] = "/proc/no/such/folder/timer"
    (newcomer,) = agents.start(broken, "newcomer", **environment)
    assert newcomer.wait() != 0
    agents.wait_for_world([healthy], size=1, after=began_at)
    agents.wait_for_undisturbed_steps([healthy], 20)
    assert left("", "its agent failed: ")[:-1] in healthy.output
    finish(agents, etcd, job, [healthy])
