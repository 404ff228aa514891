"""Training nodes that lose power, hang, are stopped, or lose their network, and come back.

Three nodes train; the others continue without the one that was hurt, and with it when it is back.
Judged by what the workers report, see worker.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.integration.containers import Host, Project

Fault = Callable[[Host], AbstractContextManager[None]]


def lose_and_regain(job: Project, trio: list[Host], victim: Host, fault: Fault) -> None:
    """Go through both changes."""
    others = [host for host in trio if host is not victim]
    started = time.time()
    with fault(victim):
        without = job.wait_for_world(others, after=started)
        back = time.time()
    again = job.wait_for_world(trio, after=back)
    assert again[0].epoch > without[0].epoch
    assert any(again[0].master_addr in host.addresses for host in trio)
    # It took no part in anything between: its steps are of worlds it was a member of.
    outside = [step for step in victim.steps() if step.epoch == without[0].epoch]
    assert not outside


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Host.killed, marks=pytest.mark.release),
        pytest.param(Host.paused, marks=pytest.mark.release),
        Host.disconnected,
    ],
)
def test_the_node_of_rank_0_is_lost(job: Project, trio: list[Host], fault: Fault) -> None:
    """It serves the workers' store, and its address is MASTER_ADDR. CI takes only the fault after
    which that may be another one; tests/torchrun and tests/faults have the others."""
    lose_and_regain(job, trio, trio[0], fault)


def test_a_node_is_stopped(job: Project, trio: list[Host]) -> None:
    """It leaves by itself within its grace, so the engine does not have to kill it."""
    lose_and_regain(job, trio, trio[1], _stopped_in_time)


@contextmanager
def _stopped_in_time(host: Host) -> Iterator[None]:
    with host.stopped():
        killed_by_engine = 128 + signal.SIGKILL
        assert host.state["ExitCode"] != killed_by_engine
        yield
