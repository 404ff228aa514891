"""torchrun on an etcd that the first node starts by itself."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from tests.support.processes import free_port
from tests.torchrun.agents import DIGITS, QUICK, Agents, Job, wait_until

pytestmark = pytest.mark.torchrun

EMBED = f"{QUICK},embed=1,embed_grace=5"


def wait_until_etcd_has_ended(port: int) -> None:
    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until("the embedded etcd has ended", refused, timeout_s=90)


@pytest.mark.release
def test_the_example_trains_without_any_etcd_set_up(agents: Agents, tmp_path: Path) -> None:
    """The README's first command. The etcd ends by itself when nobody needs it any more."""
    port = free_port()
    job = Job(f"localhost:{port}", tmp_path, nnodes="1", nproc=2, conf=EMBED, script=DIGITS)
    (agent,) = agents.start(job, "only")
    assert agent.wait() == 0
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", agent.output)
    assert float(accuracy) > 95
    wait_until_etcd_has_ended(port)


@pytest.mark.slow
def test_the_node_that_started_etcd_is_no_single_point_of_failure(
    agents: Agents, tmp_path: Path
) -> None:
    """Its agent and workers are killed; the etcd it started, with a password, lives on, and so does
    the job."""
    port = free_port()
    job = Job(f"localhost:{port}", tmp_path, nnodes="1:2", conf=EMBED)
    login = {"RDZV_ETCD_USER": "ann", "RDZV_ETCD_PASSWORD": "s3cret"}
    (starter,) = agents.start(job, "starter", **login)
    agents.wait_for_world([starter], size=1)
    (without,) = agents.start(job, "without")
    assert without.wait() != 0
    assert "etcd requires authentication, but no user and password are configured" in without.output
    (other,) = agents.start(job, "other", **login)
    agents.wait_for_world([starter, other], size=2)
    killed_at = time.time()
    starter.kill()
    agents.wait_for_world([other], size=1, after=killed_at)
    other.may_end = True
    job.stop_file.touch()
    assert other.wait() == 0
    wait_until_etcd_has_ended(port)
