"""Signals to an agent that waits, or works: its node leaves, and the process ends as by the signal.

Also as the first process of a container, for which the kernel has no default action.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rdzv_etcd.world_change import left
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agent
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_LONG = "lease_ttl=3000,last_call_timeout=5,closed_ttl=3,ended_ttl=3,timeout=600"
"""With such a lease nothing is noticed by its end."""
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def an_agent(command: list[str]) -> list[str]:
    """Not as under nohup, or in a shell's background, where some signals are ignored."""
    return ["env", "--default-signal", *command]


def a_first_process(command: list[str]) -> list[str]:
    """As a container's entry point is."""
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *an_agent(command)]


def _named(value: Any) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value)))


def send(agent: Agent, number: int) -> None:
    agent.may_end = True
    torchrun = psutil.Process(agent.process.pid)
    if torchrun.name() == "unshare":
        (torchrun,) = torchrun.children()
    os.kill(torchrun.pid, number)


@pytest.mark.parametrize(
    ("enter", "number"),
    [
        pytest.param(enter, number, marks=() if number == signal.SIGTERM else pytest.mark.release)
        for enter in (an_agent, a_first_process)
        for number in _ENDING
    ],
    ids=_named,
)
def test_an_agent_that_waits_leaves_before_it_ends(
    train: Callable[..., Training], enter: Callable[[list[str]], list[str]], number: signal.Signals
) -> None:
    job = train("2", conf=_LONG, enter=enter)
    (agent,) = job.start("agent")
    job.wait_arrivals(1)
    send(agent, number)
    assert agent.wait() == (-number if enter is an_agent else 128 + number)
    assert not job.present()


@pytest.mark.parametrize(
    "enter", [pytest.param(an_agent, marks=pytest.mark.release), a_first_process], ids=_named
)
def test_an_agent_that_connects_ends(
    etcd: EtcdServer,
    train: Callable[..., Training],
    enter: Callable[[list[str]], list[str]],
) -> None:
    """There is no node yet that could leave."""
    with FaultBridge((etcd.host, etcd.port)) as bridge:
        bridge.black_hole()
        conf = f"{_LONG},connect_timeout=600"
        job = train("2", endpoint=bridge.target, conf=conf, enter=enter)
        (agent,) = job.start("agent")
        job.wait_until("its first request", lambda: bridge.connections > 0)
        send(agent, signal.SIGTERM)
        assert agent.wait() == (-signal.SIGTERM if enter is an_agent else 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("handled", "number"),
    [
        ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", signal.SIGTERM),
        ("SIGINT", signal.SIGHUP),
        pytest.param("SIGTERM,SIGINT,SIGHUP,SIGQUIT", signal.SIGHUP, marks=pytest.mark.release),
        pytest.param("SIGINT", signal.SIGTERM, marks=pytest.mark.release),
    ],
    ids=_named,
)
def test_a_member_announces_which_signal_has_ended_it(
    train: Callable[..., Training], handled: str, number: signal.Signals
) -> None:
    """Whether torch handles the signal or not."""
    job = train("1:2", conf=f"{_LONG},orphans=kill")
    (other,) = job.start("other")
    launcher = [*job.job.launcher, f"--signals-to-handle={handled}"]
    (ended,) = job.start("ended", launcher=launcher, enter=an_agent)
    job.wait_for_world()
    workers = [psutil.Process(step.pid) for step in ended.steps()]
    send(ended, number)
    assert ended.wait() == (-number if handled == "SIGINT" else 1)
    job.wait_for_world()
    assert left("", number.name) in other.output
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
    job.finish()
