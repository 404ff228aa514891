"""Agents that are drained."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from rdzv_etcd.world_change import left
from tests.torchrun.agents import Agent
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_LONG = "lease_ttl=3000,last_call_timeout=5,closed_ttl=3,ended_ttl=3"
"""With such a lease nothing is noticed by its end."""


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
