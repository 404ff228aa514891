"""torchrun on an etcd that the first node starts by itself."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest

from tests.support.processes import free_port
from tests.torchrun.agents import DIGITS, QUICK, wait_until
from tests.torchrun.training import Training

pytestmark = pytest.mark.torchrun

EMBED = f"{QUICK},embed=1,embed_grace=5"


def wait_until_etcd_has_ended(port: int) -> None:
    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until("the embedded etcd has ended", refused, timeout_s=90)


@pytest.mark.release
def test_the_example_trains_without_any_etcd_set_up(train: Callable[..., Training]) -> None:
    """The README's first command. The etcd ends by itself when no node needs it any more."""
    port = free_port()
    job = train("1", endpoint=f"localhost:{port}", nproc=2, conf=EMBED, script=DIGITS)
    (agent,) = job.start("only")
    assert agent.wait() == 0
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", agent.output)
    assert float(accuracy) > 95
    wait_until_etcd_has_ended(port)


@pytest.mark.slow
def test_the_node_that_started_etcd_is_no_single_point_of_failure(
    train: Callable[..., Training],
) -> None:
    """Its agent and workers are killed; the etcd it started, with a secret, lives on, and so does
    the job."""
    port = free_port()
    job = train("1:2", endpoint=f"localhost:{port}", conf=EMBED)
    secret = {"RDZV_ETCD_EMBED_SECRET": "staple-battery-horse"}
    (starter,) = job.start("starter", **secret)
    job.wait_for_world()
    (without,) = job.start("without")
    assert without.wait() != 0
    assert "give every node the same RDZV_ETCD_EMBED_SECRET" in without.output
    job.start("other", **secret)
    job.wait_for_world()
    starter.kill()
    job.wait_for_world()
    job.end_workers()
    wait_until_etcd_has_ended(port)
