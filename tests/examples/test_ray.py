"""Ray's actors as nodes of a job."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

from rdzv_etcd.world_change import PROCESS_EXITED
from tests.examples.programs import Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORK = "ray"


def test_a_killed_actor_comes_back_into_the_world(
    etcd_server: EtcdServer, job_id: str, programs: Programs, framework: str
) -> None:
    # Short: Ray has its sockets there.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        program = programs.start(
            "ray_actors.py",
            etcd_server.endpoint,
            job_id,
            "--steps=200",
            python=framework,
            HOME=folder,
            RAY_TMPDIR=folder,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
        )
        found = [program.wait_for(r"(rank \d) of 2, step 20, pid (\d+)") for _ in range(2)]
        pids = {it[1]: int(it[2]) for it in found}
        os.kill(pids["rank 1"], signal.SIGKILL)
        again = {program.wait_for(r"(rank \d) of 2 begins at step [1-9]\d*")[1] for _ in range(2)}
        assert again == pids.keys()
        ended = {program.wait_for(r"actor (\d): ended at step 200")[1] for _ in range(2)}
        assert ended == {"0", "1"}
        assert program.end() == 0
        assert any(PROCESS_EXITED in line for line in program.lines)
