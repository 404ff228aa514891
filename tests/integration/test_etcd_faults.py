"""etcd nodes lose power, hang or lose their network while two nodes train: no worker restarts.

The leader, and two of three, which is the quorum. Judged by what the workers report, see worker.py;
the faults last longer than a lease. tests/faults/test_training.py kills the leader and the quorum.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest

from tests.integration.containers import LEASE_TTL_S, Host, Project, wait_until
from tests.integration.worker import STEP_S

Fault = Callable[[Host], AbstractContextManager[None]]


@pytest.fixture
def members(healed: Project) -> list[Host]:
    """The three etcd nodes, healthy, the leader first."""
    hosts = [host for host in healed.all_hosts() if host.service.startswith("etcd")]
    assert len(hosts) == 3
    wait_until("three healthy etcd nodes", lambda: all(map(is_healthy, hosts)))
    hosts.sort(key=is_leader, reverse=True)
    return hosts


def is_healthy(member: Host) -> bool:
    """Tell whether it answers a read that needs a quorum."""
    return member.attempt("etcdctl", "endpoint", "health").returncode == 0


def is_leader(member: Host) -> bool:
    (answer,) = json.loads(member.run("etcdctl", "endpoint", "status", "--write-out=json"))
    return bool(answer["Status"]["leader"] == answer["Status"]["header"]["member_id"])


_LEADER, _TWO = slice(0, 1), slice(0, 2)


@pytest.mark.parametrize(
    ("victims", "fault"),
    [
        pytest.param(_LEADER, Host.paused, id="leader-paused", marks=pytest.mark.release),
        pytest.param(_LEADER, Host.disconnected, id="leader-disconnected"),
        pytest.param(_TWO, Host.paused, id="two-paused"),
        pytest.param(_TWO, Host.disconnected, id="two-disconnected", marks=pytest.mark.release),
    ],
)
def test_training_continues(
    job: Project, pair: list[Host], members: list[Host], fault: Fault, victims: slice
) -> None:
    # The engine gives out the lowest free address: in this order each gets its own back.
    away = sorted(members[victims], key=lambda host: min(host.addresses), reverse=True)
    with ExitStack() as faults:
        for member in away:
            faults.enter_context(fault(member))
        job.expect_undisturbed(pair, steps_for(1.5 * LEASE_TTL_S))
    wait_until("three healthy etcd nodes", lambda: all(map(is_healthy, members)))
    job.expect_undisturbed(pair, steps_for(LEASE_TTL_S))


def test_a_new_world_is_formed_after_all_that(job: Project, pair: list[Host]) -> None:
    """The undisturbed job still works: a third node brings about a new world."""
    started = time.time()
    three = job.scale("node", 3)
    job.wait_for_world(three, after=started)


def steps_for(seconds: float) -> int:
    return round(seconds / STEP_S)
