"""Rounds through :class:`Group`, as a launcher uses it, with nodes in threads and in processes."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from rdzv_etcd import Left, Lost, Waiting, World
from rdzv_etcd.errors import JobSettingsMismatchError, JoinTimeoutError
from rdzv_etcd.world.group import Group
from tests.library.nodes import ALONE, LIMIT_S, Job, RemoteError, RemoteNode, at_once, join_all


def test_three_nodes_form_round_after_round(job: Job) -> None:
    """All agree on the world; ranks stay; the epoch grows."""
    with job.groups(3) as nodes:
        first = join_all(nodes)
        second = join_all(nodes)
        assert [world.rank for world in second] == [world.rank for world in first]
        for number, worlds in enumerate((first, second), start=1):
            assert sorted(world.rank for world in worlds) == [0, 1, 2]
            assert {world.round for world in worlds} == {number}
            assert {world.size for world in worlds} == {3}
            assert len({(w.master, w.epoch, w.node_ids) for w in worlds}) == 1
            for node, world in zip(nodes, worlds, strict=True):
                assert world.node_ids[world.rank] == node.node_id
        assert second[0].epoch > first[0].epoch
        assert [node.waiting_count() for node in nodes] == [0, 0, 0]


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


def test_processes_and_threads_form_one_round(job: Job) -> None:
    options = job.options("4")
    with RemoteNode(options) as one, RemoteNode(options) as two, job.groups(2, "4") as here:
        worlds = at_once(
            [
                *(lambda remote=remote: remote.call("join")["rank"] for remote in (one, two)),
                *(lambda node=node: node.join().rank for node in here),
            ]
        )
        assert sorted(worlds) == [0, 1, 2, 3]
        at_once([one.finish, two.finish, *(node.leave for node in here)])


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
        members[1].leave()
        assert first.wait_over(LIMIT_S)
        assert members[0].join().size == 2
        assert joining.result(LIMIT_S).size == 2


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
    options = job.options("1:2")
    settings = job.settings("1:2")
    with RemoteNode(options) as victim, Group(settings) as survivor:
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
    options = job.options("1:2")
    with RemoteNode(options) as paused, job.group("1:2") as other:
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


def test_a_node_that_gave_up_is_not_counted_on(job: Job) -> None:
    with job.groups(3, "2", lease_ttl=600) as nodes:
        with pytest.raises(JoinTimeoutError):
            nodes[0].join(0.2)
        assert {world.size for world in join_all(nodes[1:])} == {2}
        assert nodes[0].waiting_count() == 0


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


def test_a_rank_key_orders_the_ranks(job: Job) -> None:
    names = ["node10", "node2", "node1"]
    nodes = [job.group("3", rank_key=name) for name in names]
    try:
        assert [world.rank for world in join_all(nodes)] == [2, 1, 0]
    finally:
        at_once([node.leave for node in nodes])
