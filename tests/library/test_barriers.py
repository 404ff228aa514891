"""Named barriers among the members of a round."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rdzv_etcd import Left, MovedOn
from rdzv_etcd.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    JobClosedError,
    MisuseError,
)
from rdzv_etcd.world import collectives
from rdzv_etcd.world.group import Group
from tests.library.nodes import (
    LIMIT_S,
    RemoteError,
    RemoteNode,
    at_once,
    groups,
    join_all,
    node_options,
    node_settings,
    notified_of_nothing,
    wait_until,
)
from tests.support.leaks import LeakCheck, job_root
from tests.support.servers import EtcdServer
from tests.support.signals import handling


def _join_again(node: Group) -> None:
    node.join()


def test_all_members_pass_together(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "3"), 3) as nodes, ThreadPoolExecutor(2) as pool:
        worlds = join_all(nodes)
        early = [pool.submit(world.barrier, "saved", LIMIT_S) for world in worlds[:2]]
        _wait_for_arrivals(etcd_server, job_id, 2)
        assert not any(waiting.done() for waiting in early)
        worlds[2].barrier("saved", LIMIT_S)
        for waiting in early:
            waiting.result(LIMIT_S)


def test_across_processes(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    with (
        RemoteNode(node_options(etcd_server, job_id, "2")) as remote,
        Group(node_settings(etcd_server, job_id, "2")) as here,
    ):
        _, world = at_once([lambda: remote.call("join"), here.join])
        at_once(
            [
                lambda: remote.call("barrier", "saved", LIMIT_S),
                lambda: world.barrier("saved", LIMIT_S),
            ]
        )
        with pytest.raises(RemoteError, match="1 of 2 members"):
            remote.call("barrier", "alone", 0.3)
        at_once([remote.finish, here.leave])


def test_names_may_be_anything_and_do_not_meet(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        worlds = join_all(nodes)
        for name in ("a", "a/arrived", "../b", "gespeichert: größe", "0"):
            at_once([partial(world.barrier, name, LIMIT_S) for world in worlds])
        with pytest.raises(BarrierTimeoutError):
            worlds[0].barrier("a/", 0.2)


def test_a_time_limit_names_who_is_missing(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        worlds = join_all(nodes)
        host, _, _ = nodes[1].node_id.partition("~")
        with pytest.raises(BarrierTimeoutError, match="1 of 2 members are missing") as caught:
            worlds[0].barrier("saved", 0.3)
        assert host in str(caught.value)
        assert caught.value.missing == (nodes[1].node_id,)
        assert f"round {worlds[0].round}" in str(caught.value)
        assert "'saved'" in str(caught.value)


def test_a_change_breaks_it(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    with (
        groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes,
        ThreadPoolExecutor(1) as pool,
    ):
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        nodes[1].leave()
        with pytest.raises(BarrierBrokenError, match="round 1 is over"):
            waiting.result(LIMIT_S)


@pytest.mark.parametrize("goes_on", [Group.leave, Group.finish, _join_again])
def test_all_pass_a_barrier_although_one_goes_on_as_soon_as_it_has_passed(
    leak_check: LeakCheck,
    etcd_server: EtcdServer,
    job_id: str,
    monkeypatch: pytest.MonkeyPatch,
    goes_on: Callable[[Group], object],
) -> None:
    monkeypatch.setattr(collectives, "puts_after", notified_of_nothing)
    with (
        groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes,
        ThreadPoolExecutor(2) as pool,
    ):
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        worlds[1].barrier("saved", LIMIT_S)
        gone_on = pool.submit(goes_on, nodes[1])
        waiting.result(LIMIT_S)
        nodes[0].leave()
        gone_on.result(LIMIT_S)


def test_a_name_may_be_used_again_in_the_next_round(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        for _ in range(3):
            worlds = join_all(nodes)
            with pytest.raises(BarrierTimeoutError):
                worlds[0].barrier("saved", 0.2)
            at_once([partial(world.barrier, "saved", LIMIT_S) for world in worlds])


def test_a_name_used_again_is_a_new_barrier(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(1) as pool:
        worlds = join_all(nodes)
        left = []
        for turn in range(6):
            waiting = pool.submit(worlds[turn % 2].barrier, "step", LIMIT_S)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            worlds[1 - turn % 2].barrier("step", LIMIT_S)
            waiting.result(LIMIT_S)
            left.append(len(etcd_server.keys(job_root(job_id) + b"barrier/")))
        assert left[2:] == left[-1:] * 4  # what it leaves does not grow
        with pytest.raises(BarrierTimeoutError, match="1 of 2 members"):
            worlds[0].barrier("step", 0.3)
        at_once([partial(world.barrier, "step", LIMIT_S) for world in worlds])


def test_who_waits_hears_at_once_that_the_job_is_closed(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(1) as pool:
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved")
        _wait_for_arrivals(etcd_server, job_id, 1)
        nodes[1].finish("done")
        with pytest.raises(JobClosedError, match="done"):
            waiting.result(LIMIT_S)
        with pytest.raises(JobClosedError, match="done") as caught:
            worlds[1].barrier("saved")
        assert caught.value.reason == "done"
        assert caught.value.closed_by in {node.node_id for node in nodes}


def test_an_arrival_stands_again_after_its_lease_was_lost(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(1) as pool:
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        (arrival,) = _arrivals(etcd_server, job_id)
        lease_id = etcd_server.gateway.keys(arrival)[arrival].lease_id
        etcd_server.gateway.revoke(lease_id)
        _wait_for_arrivals(etcd_server, job_id, 1)
        worlds[1].barrier("saved", LIMIT_S)
        waiting.result(LIMIT_S)
        assert [node.waiting_count() for node in nodes] == [0, 0]
        assert worlds[0].size == 2


def test_who_waits_hears_at_once_that_its_own_node_joins_again(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(2) as pool:
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        joining = pool.submit(nodes[0].join)
        with pytest.raises(BarrierBrokenError):
            waiting.result(LIMIT_S / 2)
        nodes[1].join()
        assert joining.result(LIMIT_S).round == 2


def test_who_is_interrupted_has_left_the_world_and_may_join_again(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def when_there() -> None:
        _wait_for_arrivals(etcd_server, job_id, 1)
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    with (
        groups(node_settings(etcd_server, job_id, "2"), 2) as nodes,
        ThreadPoolExecutor(1) as pool,
        handling(signal.SIGUSR1, interrupt),
    ):
        worlds = join_all(nodes)
        watching = pool.submit(when_there)
        with pytest.raises(KeyboardInterrupt):
            worlds[0].barrier("saved", LIMIT_S)
        watching.result(LIMIT_S)
        assert worlds[0].over
        why = "was interrupted in barrier 'saved': KeyboardInterrupt"
        assert worlds[0].change == MovedOn(why)
        with pytest.raises(BarrierBrokenError, match=f"this node {why}, which ended its part"):
            worlds[0].barrier("saved", LIMIT_S)
        assert not _arrivals(etcd_server, job_id)
        with pytest.raises(BarrierBrokenError) as caught:
            worlds[1].barrier("saved", LIMIT_S)
        assert caught.value.change == Left({nodes[0].node_id: why})
        worlds = join_all(nodes)
        at_once([partial(world.barrier, "saved", LIMIT_S) for world in worlds])


def test_who_hears_that_the_world_is_over_does_not_count_as_being_there(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    """Others may not have heard of it: all pass, or none."""
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(2) as pool:
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        joining = pool.submit(nodes[0].join)
        with pytest.raises(BarrierBrokenError):
            waiting.result(LIMIT_S)
        assert not _arrivals(etcd_server, job_id)
        nodes[1].join()
        joining.result(LIMIT_S)


def test_a_second_thread_at_the_same_barrier_is_refused(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes, ThreadPoolExecutor(1) as pool:
        worlds = join_all(nodes)
        waiting = pool.submit(worlds[0].barrier, "saved", LIMIT_S)
        _wait_for_arrivals(etcd_server, job_id, 1)
        with pytest.raises(MisuseError, match="waits at barrier 'saved' already"):
            worlds[0].barrier("saved", LIMIT_S)
        worlds[1].barrier("saved", LIMIT_S)
        waiting.result(LIMIT_S)


@pytest.mark.parametrize("name", [7, None, b"saved", ["saved"]])
def test_a_name_is_text(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, name: object
) -> None:
    """The names 7 and "7" would be the same barrier, counted twice."""
    with Group(node_settings(etcd_server, job_id, "1")) as node:
        world = node.join()
        with pytest.raises(MisuseError, match=f"must be text, not {type(name).__name__}"):
            world.barrier(name)  # type: ignore[arg-type]


def test_a_name_has_a_limit(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    with Group(node_settings(etcd_server, job_id, "1")) as node:
        world = node.join()
        world.barrier("ä" * 1000)
        with pytest.raises(MisuseError, match="has 1001 characters; it must have at most 1000"):
            world.barrier("ä" * 1001)


def _arrivals(server: EtcdServer, job_id: str) -> list[bytes]:
    """The keys of the arrivals that count."""
    return [key for key in server.keys(job_root(job_id) + b"barrier/") if b"/given/" in key]


def _wait_for_arrivals(server: EtcdServer, job_id: str, count: int) -> None:
    wait_until("nodes at the barrier", lambda: len(_arrivals(server, job_id)) == count)
