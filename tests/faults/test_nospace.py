"""A real etcd is out of space when a member has to join again: it waits for the operator.

Newcomers are refused at once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.nodes import TTL_S, NodeProcess, Nodes
from tests.faults.servers import Job, ended_with, fill, make_room
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.slow

_QUOTA = 2 * 1024 * 1024
_CURE = "etcdctl alarm disarm"


@pytest.fixture
def small_etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """An etcd that some ballast fills."""
    return fresh_etcd(flags=("--quota-backend-bytes", str(_QUOTA)))


def lose_one_then_fill(
    nodes: Nodes, members: list[NodeProcess], etcd: EtcdServer
) -> list[NodeProcess]:
    """Freeze a member until the others continue without it, fill etcd, and let it join again."""
    nodes.wait_for_world(members)
    *rest, late = members
    joined = len(late.all("join"))  # once, or once more if another member started later
    late.freeze()
    nodes.wait_for_world(rest)
    fill(etcd.gateway)
    late.thaw()
    nodes.wait_until("it joins again", lambda: len(late.all("join")) > joined)
    return rest


@pytest.mark.every_etcd
def test_a_member_that_joins_again_waits_for_the_cure(small_etcd: EtcdServer, job: Job) -> None:
    """It logs once what it waits for; the others work on; a newcomer is refused at once. Then all
    work together."""
    nodes = job(small_etcd.endpoint, "2:3")
    three = nodes.start("a", "b", "late")
    rest = lose_one_then_fill(nodes, three, small_etcd)
    late = three[-1]
    nodes.wait_until("it names the cure", lambda: _CURE in late.output.read_text())
    nodes.stay_undisturbed(three, 2 * TTL_S)
    assert nodes.wait_for_world(rest).size == 2
    (line,) = (line for line in late.output.read_text().splitlines() if "waiting up to" in line)
    assert _CURE in line
    (newcomer,) = nodes.start("newcomer")
    kind, message = ended_with(newcomer)
    assert kind == "EtcdNoSpaceError"
    assert "over its quota" in message
    make_room(small_etcd.gateway)
    nodes.wait_for_world(three)
    nodes.finish(small_etcd.gateway)


@pytest.mark.release  # tests/node/test_refusals.py shows the same
def test_it_gives_up_after_the_join_timeout_with_the_cause(
    small_etcd: EtcdServer, job: Job
) -> None:
    nodes = job(small_etcd.endpoint, "2:3", join_timeout=15)
    three = nodes.start("a", "b", "late")
    rest = lose_one_then_fill(nodes, three, small_etcd)
    kind, message = ended_with(three[-1])
    assert kind == "EtcdNoSpaceError"
    assert "within 15 s" in message
    assert _CURE in message
    nodes.stay_undisturbed(rest, TTL_S)
    make_room(small_etcd.gateway)
    nodes.finish(small_etcd.gateway)
