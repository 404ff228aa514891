"""JAX in the worlds of a group."""

from __future__ import annotations

import pytest

from tests.examples.programs import Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORK = "jax"


def test_jax_processes_work_together_and_go_on_without_a_lost_one(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str
) -> None:
    """The launcher of one of two is killed; the other's JAX process is replaced by one alone."""
    started = [
        programs.start(
            "jax_processes.py",
            etcd_server.endpoint,
            job_id,
            "--nodes=1:2",
            "--steps=500",
            python=framework,
            JAX_PLATFORMS="cpu",
        )
        for _ in range(2)
    ]
    for program in started:
        program.wait_for("^step 3: 2 processes, 2 devices, sum of ranks 1$")
    victim, survivor = started
    programs.kill(victim)
    victim.end()  # its JAX process has ended, too: it would hold the pipe
    survivor.wait_for("^world 1 is over: lost ")
    survivor.wait_for("^step 500: 1 processes, 1 devices, sum of ranks 0$")
    assert survivor.end() == 0
