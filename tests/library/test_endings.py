"""How a node's part ends: leaving, closing the job, and the end of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from rdzv_etcd import Failed, Finished, MovedOn, observe
from rdzv_etcd.errors import JobClosedError, RendezvousFailedError
from rdzv_etcd.world.group import Group
from tests.library.nodes import LIMIT_S, Job, at_once, groups, node_settings, wait_until
from tests.support.bridge import Direction, FaultBridge

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


@pytest.mark.parametrize(
    ("ending", "status"),
    [(None, 0), (("exit", 3), 3), (("divide",), 1)],
    ids=["returns", "sys.exit", "raises"],
)
def test_a_process_that_just_ends_leaves_at_once(
    job: Job, ending: tuple[object, ...] | None, status: int
) -> None:
    """When it is gone, its keys and its lease are gone."""
    with job.remote(lease_ttl=LONG_S) as node:
        node.call("join")
        assert job.keys()
        if ending is not None:
            with pytest.raises(EOFError):
                node.call(*ending)  # type: ignore[arg-type]
        assert node.finish() == status
        assert not job.left(leases=True)


def test_a_process_that_ends_while_it_joins_leaves_at_once(job: Job) -> None:
    """The main thread ends while another one waits for a round."""
    program = (
        "import json, sys, threading\n"
        "from rdzv_etcd.world.group import Group\n"
        "from rdzv_etcd.settings.parse import settings_from_config\n"
        "group = Group(settings_from_config(environ={}, **json.loads(sys.argv[1])))\n"
        "threading.Thread(target=group.join, daemon=True).start()\n"
        "sys.stdin.read(1)\n"
    )
    options = json.dumps(job.options("2", lease_ttl=LONG_S))
    with subprocess.Popen([sys.executable, "-c", program, options], stdin=subprocess.PIPE) as node:
        wait_until("its arrival", lambda: job.keys(b"nodes/"))
        node.communicate(timeout=LIMIT_S)
    assert not job.left(leases=True)


def test_leaving_the_block_leaves_the_group(job: Job) -> None:
    """With an error as well; leaving again does nothing."""
    settings = job.settings(lease_ttl=LONG_S)
    with pytest.raises(ZeroDivisionError), Group(settings) as node:
        assert node.join().size / 0
    assert not job.left()
    node.leave()
    node.leave()


def test_a_call_with_wrong_arguments_ends_nothing(job: Job) -> None:
    with job.groups(1) as (group,):
        world = group.join()
        calls: list[tuple[Any, tuple[str, ...]]] = [
            (world.barrier, ()),
            (world.exchange, ()),
            (group.leave, ("for", "good")),
        ]
        for call, arguments in calls:
            with pytest.raises(TypeError):
                call(*arguments)
        world.store.set("key", b"")  # after it, what the calls may have begun is done
        assert not world.over
        assert not group.has_left


def test_what_a_group_that_has_left_says(job: Job) -> None:
    node = job.group()
    world = node.join()
    assert not world.over
    node.leave()
    assert node.waiting_count() == 0
    assert world.over
    assert world.wait_over()
    assert isinstance(world.change, MovedOn)
    with pytest.raises(RendezvousFailedError, match="left"):
        node.join()
    with pytest.raises(RendezvousFailedError, match="left"):
        world.barrier("saved")
    with pytest.raises(RendezvousFailedError, match="left"):
        world.exchange(b"mine")
    with pytest.raises(RendezvousFailedError, match="left"):
        world.store.get("key")
    with pytest.raises(RendezvousFailedError, match="left"):
        assert world.members
    with pytest.raises(RendezvousFailedError, match="left"):
        node.finish()


def test_leaving_while_another_thread_waits_for_a_change_ends_the_wait(job: Job) -> None:
    node = job.group(lease_ttl=LONG_S)
    world = node.join()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.wait_over)
        assert not world.wait_over(0.1)
        node.leave()
        assert waiting.result(LIMIT_S)


def test_closing_tells_everybody_by_whom_and_why(job: Job) -> None:
    with job.worlds(2) as (nodes, worlds):
        assert nodes[0].fail("the data is unusable")
        assert worlds[1].wait_over(LIMIT_S)
        assert worlds[1].change == Failed(nodes[0].node_id, "the data is unusable")
        closure = nodes[1].closure()
        assert closure is not None
        assert (closure.by, closure.reason) == (nodes[0].node_id, "the data is unusable")
        assert not closure.succeeded
        for node in nodes:
            with pytest.raises(JobClosedError, match="the data is unusable") as caught:
                node.join()
            assert caught.value.was_member


def test_success_asks_nobody_to_join_again(job: Job) -> None:
    with job.worlds(2) as (nodes, worlds):
        assert at_once([partial(node.finish, "done") for node in nodes]) == [True, True]
        first, second = (world.change for world in worlds)
        assert first == second
        assert first in [Finished(node.node_id, "done") for node in nodes]
        assert [node.waiting_count() for node in nodes] == [0, 0]
        closures = [node.closure() for node in nodes]
        assert [closure is not None and closure.succeeded for closure in closures] == [True, True]


def test_only_a_member_closes_a_job_but_any_node_may_fail_it_by_force(job: Job) -> None:
    """One that knows that all is lost."""
    settings = job.settings()
    with Group(settings) as member, Group(settings) as bystander:
        assert not bystander.fail("too early", force=True)
        world = member.join()
        assert not bystander.finish("not mine to say")
        assert not bystander.fail("not mine to say")
        assert member.closure() is None
        assert not world.wait_over(0.3)
        assert bystander.fail("the disk is full", force=True)
        assert world.wait_over(LIMIT_S)
        assert world.change == Failed(bystander.node_id, "the disk is full")


@pytest.mark.parametrize("direction", [Direction.BOTH, Direction.TO_CLIENT])
def test_every_call_says_that_the_node_has_left_if_another_thread_leaves_meanwhile(
    job: Job, direction: Direction
) -> None:
    """Not what its requests met when the connection was closed under them."""
    job.leaks.timeout_s = 30.0  # etcd hears of no good-bye, so nobody removes the job
    job.leaks.keys_allowed += (b"store/", b"barrier/", b"ctl/change")
    with FaultBridge(job.server.address) as bridge:
        settings = node_settings(bridge.target, job.id, "2", peer_links=False)
        with groups(settings, 1) as (here,), job.groups(1, "2", peer_links=False) as (other,):
            world, _ = at_once([here.join, other.join])
            calls: dict[str, Callable[[], object]] = {
                "finish": here.finish,
                "fail": partial(here.fail, "test"),
                "fail with force": partial(here.fail, "test", force=True),
                "events": here.events,
                "barrier": partial(world.barrier, "test", LIMIT_S),
                "exchange": partial(world.exchange, b"test", LIMIT_S),
                "members": lambda: world.members,
                "set": partial(world.store.set, "a", b"1", LIMIT_S),
                "get": partial(world.store.get, "b", LIMIT_S),
                "add": partial(world.store.add, "c", 1, LIMIT_S),
                "check": partial(world.store.check, ["d"], LIMIT_S),
                "num_keys": partial(world.store.num_keys, LIMIT_S),
                "delete": partial(world.store.delete, "e", LIMIT_S),
            }
            bridge.black_hole(direction)
            with ThreadPoolExecutor(len(calls)) as pool:
                begun = {name: pool.submit(call) for name, call in calls.items()}
                wait_until(
                    "all calls wait",
                    lambda: len(here._part.loop_thread._thread._calls) == len(calls),
                )
                here.leave("test")
                met = {name: call.exception(LIMIT_S) for name, call in begun.items()}
            bridge.heal()
    said = {name: (type(error), str(error)) for name, error in met.items()}
    left = (RendezvousFailedError, "this node has left the job")
    assert {name: said[name] for name in said if said[name] != left} == {}


def test_a_join_says_that_the_node_has_left_if_another_thread_leaves_meanwhile(job: Job) -> None:
    job.leaks.timeout_s = 30.0  # etcd hears of no good-bye
    with (
        FaultBridge(job.server.address) as bridge,
        groups(node_settings(bridge.target, job.id, "2"), 1) as (here,),
        ThreadPoolExecutor(1) as pool,
    ):
        bridge.black_hole()
        joining = pool.submit(here.join)
        wait_until("it joins", lambda: here._part.loop_thread._thread._calls)
        here.leave("test")
        with pytest.raises(RendezvousFailedError, match=r"^this node has left the job$"):
            joining.result(LIMIT_S)
        bridge.heal()


@pytest.mark.parametrize("direction", [Direction.BOTH, Direction.TO_CLIENT])
def test_an_observer_s_calls_say_that_it_was_closed_meanwhile(
    job: Job, direction: Direction
) -> None:
    with (
        FaultBridge(job.server.address) as bridge,
        observe(bridge.target, job=job.id) as observer,
        ThreadPoolExecutor(1) as pool,
    ):
        bridge.black_hole(direction)
        asking = pool.submit(observer.state)
        wait_until("it asks", lambda: observer._part.loop_thread._thread._calls)
        observer.close()
        with pytest.raises(RendezvousFailedError, match="closed"):
            asking.result(LIMIT_S)
        bridge.heal()
