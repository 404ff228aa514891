"""Agents that are drained, hung, or kept out by their gate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv_etcd.world_change import how_wedged, left
from tests.torchrun.agents import Agent
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_LONG = "lease_ttl=3000,last_call_timeout=5,closed_ttl=3,ended_ttl=3"
"""With such a lease nothing is noticed by its end."""
_WATCHDOG_S = 15
"""Longer than an agent on a busy machine needs to start its workers."""


def drain(agent: Agent) -> None:
    agent.may_end = True
    agent.process.send_signal(signal.SIGUSR1)
    assert agent.wait() == 0


def test_a_drained_agent_ends_well_and_costs_the_others_no_restart(
    train: Callable[..., Training],
) -> None:
    """First one that does not lead, then the leader; no agent may restart after a failure."""
    job = train("1:3", conf=_LONG, max_restarts=0)
    started = job.start("a", "b", "c")
    job.wait_for_world()
    leads = job.leader()
    for drained in (next(agent for agent in started if agent is not leads), leads):
        drain(drained)
        job.wait_for_world()
    assert left("", "drained: SIGUSR1") in leads.output
    job.end_workers()


def test_a_hung_agent_is_lost_and_comes_back(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    """Its main thread hangs; its worker and all its other threads work on, and its lease would."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    launcher = [str(Path(__file__).with_name("wedged.py")), str(fifo)]
    job = train("1:2", conf=f"{_LONG},watchdog={_WATCHDOG_S}", launcher=launcher)
    hung, other = job.start("hung", "other")
    job.wait_for_world()
    hung.process.send_signal(signal.SIGUSR2)
    job.wait_for_world(other)
    assert how_wedged(15.0) in other.output
    assert "fifo.read_text()" in hung.output  # where its thread is
    fifo.write_text("continue")
    job.wait_for_world(hung, other)
    job.end_workers()
    assert ": this node is hung: " not in other.output
