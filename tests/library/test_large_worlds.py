"""Worlds whose ranks are published in slices, on a real etcd: to a user they are like others."""

from __future__ import annotations

from functools import partial

from rdzv_etcd.world.group import Group
from tests.library.nodes import LIMIT_S, Job, at_once, join_all

NODES = 7


def test_members_find_their_ranks_in_slices_round_after_round(job: Job) -> None:
    with job.groups(NODES, "2:7", slice_nodes=2) as nodes:
        first = join_all(nodes)
        second = join_all(nodes)
        for worlds in (first, second):
            assert sorted(world.rank for world in worlds) == list(range(NODES))
            assert {world.size for world in worlds} == {NODES}
            by_rank = sorted(zip(worlds, nodes, strict=True), key=lambda pair: pair[0].rank)
            members = tuple(node.node_id for _, node in by_rank)
            assert {world.node_ids for world in worlds} == {members}
        assert [world.rank for world in second] == [world.rank for world in first]
        survivors = nodes[:-2]
        for node in nodes[-2:]:
            node.leave()
        assert all(world.wait_over(LIMIT_S) for world in second[:-2])
        third = join_all(survivors)
        assert sorted(world.rank for world in third) == list(range(NODES - 2))


def test_a_spare_of_a_large_world_takes_a_seat_that_becomes_free(job: Job) -> None:
    with job.groups(4, "3", slice_nodes=1) as nodes:
        waiting = at_once([partial(_seat, node) for node in nodes[:3]])
        assert sorted(waiting) == [0, 1, 2]
        nodes[0].leave()
        ranks = at_once([partial(_seat, node) for node in nodes[1:]])
        assert sorted(ranks) == [0, 1, 2]


def _seat(node: Group) -> int:
    return node.join(LIMIT_S).rank
