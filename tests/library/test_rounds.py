"""Rounds through :class:`Group`, as a launcher uses it, with nodes in threads and in processes."""

from __future__ import annotations

import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rdzv_etcd import Left, Lost, Waiting, World
from rdzv_etcd.errors import JobSettingsMismatchError, JoinTimeoutError, MisuseError
from rdzv_etcd.world.group import Group
from tests.library.nodes import (
    ALONE,
    LIMIT_S,
    Job,
    RemoteError,
    at_once,
    groups,
    join_all,
    node_settings,
    wait_until,
    when_entered,
)
from tests.support.signals import handling


@pytest.mark.parametrize(
    ("count", "sizes"), [(3, {}), (7, {"slice_nodes": 2})], ids=["", "ranks in slices"]
)
def test_nodes_form_round_after_round(job: Job, count: int, sizes: dict[str, Any]) -> None:
    """All agree on the world; ranks stay; the epoch grows; and so it is without one of them."""
    with job.groups(count, f"2:{count}", **sizes) as nodes:
        rounds = [join_all(nodes), join_all(nodes)]
        for number, worlds in enumerate(rounds, start=1):
            assert sorted(world.rank for world in worlds) == list(range(count))
            assert {world.round for world in worlds} == {number}
            assert {world.size for world in worlds} == {count}
            assert len({(w.master, w.epoch, w.node_ids) for w in worlds}) == 1
            for node, world in zip(nodes, worlds, strict=True):
                assert world.node_ids[world.rank] == node.node_id
        first, second = rounds
        assert [world.rank for world in second] == [world.rank for world in first]
        assert second[0].epoch > first[0].epoch
        assert [node.waiting_count() for node in nodes] == [0] * count
        nodes[-1].leave()
        assert all(world.wait_over(LIMIT_S) for world in second[:-1])
        third = join_all(nodes[:-1])
        assert sorted(world.rank for world in third) == list(range(count - 1))


def test_a_further_round_needs_no_name_server(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is lost may be lost to it as well, and to hear that may take many seconds."""
    asked: list[str] = []
    answer = socket.getaddrinfo

    def look_up(host: str, *more: Any, **options: Any) -> list[Any]:
        asked.append(host)
        return answer(host, *more, **options)

    settings = node_settings(f"localhost:{job.server.port}", job.id, "2")
    settings = replace(settings, local_addr=None)
    with groups(settings, 2) as nodes:
        first = join_all(nodes)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        assert {world.master.address for world in (*first, *join_all(nodes))} == {
            first[0].master.address
        }
        assert "localhost" not in asked


def test_only_rank_0_has_the_masters_listening_socket(job: Job) -> None:
    with job.worlds(2) as (_, worlds):
        master = worlds[0].master
        with socket.create_connection((master.address, master.port), LIMIT_S):
            pass
        listeners = {world.rank: world.take_listener() for world in worlds}
        assert listeners[1] is None
        assert listeners[0] is not None
        assert listeners[0].port == master.port
        assert [world.take_listener() for world in worlds] == [None, None]
        listeners[0].close()


def test_a_newcomer_is_noticed_and_taken_in(job: Job) -> None:
    settings = job.settings("1:2", **ALONE)
    with Group(settings) as early, ThreadPoolExecutor(1) as pool:
        alone = early.join()
        assert (alone.rank, alone.size) == (0, 1)
        assert not alone.wait_over(0.2)
        with Group(settings) as late:
            joining = pool.submit(late.join)
            assert alone.wait_over(LIMIT_S)
            assert alone.change == Waiting((late.node_id,))
            assert early.waiting_count() == 1
            together = early.join()
            assert (together.rank, together.size) == (0, 2)
            assert joining.result(LIMIT_S).rank == 1
            assert early.waiting_count() == 0


def test_a_spare_waits_without_disturbing_and_takes_over(job: Job) -> None:
    """The spare waits longer than its join timeout: that bounds the wait for enough nodes only."""
    with job.groups(2) as members, job.group("2") as spare, ThreadPoolExecutor(1) as pool:
        first, _ = join_all(members)
        joining = pool.submit(spare.join, 1.0)
        assert not first.wait_over(2.0)
        assert not joining.done()
        assert [member.waiting_count() for member in members] == [0, 0]
        members[1].leave()
        assert first.wait_over(LIMIT_S)
        assert members[0].join().size == 2
        assert joining.result(LIMIT_S).size == 2


def test_worlds_consist_of_whole_segments(job: Job) -> None:
    """What is left of a broken one waits without disturbing, until it is whole."""
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:

        def node(domain: str) -> Group:
            return stack.enter_context(job.group("2:4", segment_size=2, domain_key=domain))

        left, leaves, *right = [node("rack-1"), node("rack-1"), node("rack-2"), node("rack-2")]
        first = join_all([*right, left, leaves])
        assert [world.rank // 2 for world in first] == [1, 1, 0, 0]
        leaves.leave()
        assert all(world.wait_over(LIMIT_S) for world in first[:3])
        waits = pool.submit(left.join)
        second = join_all(right)
        assert {world.size for world in second} == {2}
        assert not second[0].wait_over(1.0)
        instead = pool.submit(node("rack-1").join)
        assert second[0].wait_over(LIMIT_S)
        third = [*join_all(right), waits.result(LIMIT_S), instead.result(LIMIT_S)]
        assert {world.size for world in third} == {4}
        assert {third[2].rank // 2, third[3].rank // 2} == {1}


def test_a_node_that_leaves_is_noticed_long_before_its_lease_would_end(job: Job) -> None:
    with job.groups(2, "1:2", lease_ttl=600) as nodes:
        worlds = join_all(nodes)
        nodes[0].leave("enough")
        assert worlds[1].wait_over(LIMIT_S)
        assert worlds[1].change == Left({nodes[0].node_id: "enough"})
        assert nodes[1].waiting_count() > 0
        assert nodes[1].join().size == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_process_that_is_killed_is_noticed_when_its_lease_ends(
    job: Job, how: signal.Signals
) -> None:
    """SIGTERM too: without a handler Python ends at once, and runs no exit functions."""
    without = {"peer_links": False}
    with job.remote("1:2", **without) as victim, job.group("1:2", **without) as survivor:
        assert victim.node_id
        size, world = at_once([lambda: victim.call("join")["size"], survivor.join])
        assert size == world.size == 2
        victim.process.send_signal(how)
        assert victim.process.wait(LIMIT_S) == -how
        assert world.wait_over(LIMIT_S)
        assert world.change == Lost({victim.node_id: "lease expired"})
        assert survivor.waiting_count() > 0
        assert survivor.join().size == 1


def test_a_node_that_the_others_went_on_without_re_joins(job: Job) -> None:
    """Paused beyond its lease, it finds out as soon as it wakes."""
    with job.remote("1:2") as paused, job.group("1:2") as other:
        assert paused.node_id
        _, world = at_once([lambda: paused.call("join"), other.join])
        paused.process.send_signal(signal.SIGSTOP)
        assert world.wait_over(LIMIT_S)
        world = other.join()
        assert world.size == 1
        paused.process.send_signal(signal.SIGCONT)
        assert paused.call("wait_over", LIMIT_S)
        assert paused.call("waiting_count") > 0
        sizes = at_once([lambda: paused.call("join")["size"], lambda: _rejoin(other, world)])
        assert sizes == [2, 2]
        paused.finish()


def _rejoin(node: Group, world: World) -> int:
    assert world.wait_over(LIMIT_S)
    return node.join().size


def test_a_join_gives_up_and_names_who_arrived(job: Job) -> None:
    with job.group("2:3") as node:
        with pytest.raises(JoinTimeoutError, match=r"1 of at least 2 nodes arrived") as caught:
            node.join(0.5)
        assert node.node_id.split("~")[0] in str(caught.value)
        assert caught.value.arrived == (node.node_id,)
        with pytest.raises(JoinTimeoutError):  # and it can try again
            node.join(0.5)


def test_other_settings_are_refused_with_both_values(job: Job) -> None:
    settings = job.settings("1:2", **ALONE)
    with Group(settings) as node, job.remote("2:4") as stranger:
        node.join()
        with pytest.raises(RemoteError, match=r"min_nodes=2, max_nodes=4.*min_nodes=1, max_nod"):
            stranger.call("join")
        assert node.waiting_count() == 0
        with job.group("1:3") as other, pytest.raises(JobSettingsMismatchError):
            other.join()
        stranger.finish()


def test_a_second_join_meanwhile_is_refused_and_harms_nothing(job: Job) -> None:
    with job.groups(2) as (one, other), ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.join)
        place = job.root + b"nodes/" + one.node_id.encode()
        wait_until("it has arrived", lambda: job.server.keys(place))
        for _ in range(2):
            with pytest.raises(MisuseError, match=f"joining job '{job.id}' already"):
                one.join()
        assert other.join().size == 2
        assert first.result(LIMIT_S).round == 1
        assert (one.waiting_count(), other.waiting_count()) == (0, 0)


def test_a_join_that_was_called_wrongly_lets_no_other_begin(job: Job) -> None:
    with job.groups(2) as (one, other), ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.join)
        place = job.root + b"nodes/" + one.node_id.encode()
        wait_until("it has arrived", lambda: job.server.keys(place))
        with pytest.raises(TypeError):
            one.join(until="tomorrow")  # type: ignore[call-arg]
        with pytest.raises(MisuseError, match=f"joining job '{job.id}' already"):
            one.join(1.0)
        assert other.join().size == 2
        assert first.result(LIMIT_S).round == 1


def test_a_join_that_is_interrupted_when_it_is_done_leaves_the_world(job: Job) -> None:
    """Nobody would work in it. The others are told at once, and the node may join again."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    main = threading.get_ident()
    with (
        job.groups(2) as (one, other),
        ThreadPoolExecutor(1) as pool,
        handling(signal.SIGUSR1, interrupt),
    ):
        joining = pool.submit(other.join)
        with (
            when_entered(one._part.node, lambda: signal.pthread_kill(main, signal.SIGUSR1)),
            pytest.raises(KeyboardInterrupt),
        ):
            one.join()
        world = joining.result(LIMIT_S)
        assert world.wait_over(LIMIT_S)
        assert world.change == Left({one.node_id: "was interrupted in its join: KeyboardInterrupt"})
        worlds = join_all([one, other])
        at_once([partial(world.barrier, "all", LIMIT_S) for world in worlds])


def test_a_node_may_join_again_after_a_join_that_failed(job: Job) -> None:
    with job.groups(2) as nodes:
        with pytest.raises(JoinTimeoutError):
            nodes[0].join(0.3)
        assert [world.round for world in join_all(nodes)] == [1, 1]
