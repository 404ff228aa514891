"""Large worlds in slices: cut, published, read and assembled, and the members that are unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.etcd.port import Delete, Op, Put, Txn
from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.census import take_census
from rdzv_etcd.protocol.model import Slice, Slices
from rdzv_etcd.protocol.ranks import assemble, cut, slices_for
from rdzv_etcd.protocol.views import slice_from, slices_from
from tests.protocol.scenes import NOW_S, Scene
from tests.protocol.store import Store, info, world

MEMBERS = st.lists(st.text(min_size=1, max_size=12), unique=True, min_size=1, max_size=60).map(
    tuple
)


@given(MEMBERS, st.integers(1, 20))
def test_slices_are_assembled_to_the_members_that_were_cut(
    members: tuple[str, ...], slice_nodes: int
) -> None:
    slices = slices_for(len(members), slice_nodes, "e")
    if slices is None:
        assert len(members) <= slice_nodes
        return
    parts = cut(members, slices)
    assert len(parts) == slices.count
    assert assemble(parts, slices.size) == (members, True)
    for rank, node_id in enumerate(members):
        assert parts[slices.index_of(node_id)][node_id] == rank


def test_slices_are_of_about_the_size_asked_for() -> None:
    members = tuple(f"node{index}~{index}~{index:08x}" for index in range(10_000))
    slices = slices_for(len(members), 128, "e")
    assert slices is not None
    assert slices.count == 313
    assert max(len(part) for part in cut(members, slices)) < 2 * 32


@given(MEMBERS, st.data())
def test_members_of_a_missing_slice_are_unknown(
    members: tuple[str, ...], data: st.DataObject
) -> None:
    slices = Slices(len(members), 7, "e")
    parts = cut(members, slices)
    missing = data.draw(st.sets(st.integers(0, 6)))
    found, complete = assemble(
        [part for index, part in enumerate(parts) if index not in missing], slices.size
    )
    for rank, node_id in enumerate(members):
        unknown = slices.index_of(node_id) in missing
        assert is_unknown(found[rank]) if unknown else found[rank] == node_id
    assert complete == (not any(is_unknown(node_id) for node_id in found))


def test_a_rank_out_of_the_world_does_no_harm() -> None:
    assert assemble([{"a": 0, "b": 7}], 2)[1] is False


@pytest.mark.parametrize("members", ["a b", "a nobody~1"])
def test_a_node_that_has_not_arrived_again_may_be_an_unknown_member(members: str) -> None:
    """A spare that arrived before a round is left alone only if all its members are known."""
    scene = Scene(members=members).spare("s")
    if "nobody~1" in members:
        scene.gone("nobody~1")
    record = scene.control.round
    assert record is not None
    record = replace(record, slices=Slices(2, 2, "e"))
    census = take_census(replace(scene.control, round=record), scene.nodes, scene.settings)
    newcomers = [presence.info.node_id for presence in census.newcomers]
    if "nobody~1" in members:
        assert (list(census.idle), newcomers) == (["s"], [])
        assert census.absent == ("nobody~1",)
    else:
        assert (list(census.idle), newcomers) == ([], ["s"])


def test_a_member_whose_slice_is_gone_keeps_its_seat_though_others_came_before_it() -> None:
    """It claims itself that it was in the world: a new one without it would begin again."""
    scene = Scene(1, 2, members="a nobody~1").gone("a nobody~1").slices().new("x y", NOW_S - 9)
    scene.new("b", NOW_S - 1, trained=scene.control.epoch)
    assert scene.closed_world() == "b x"


def test_a_member_of_an_earlier_world_than_the_one_whose_slice_is_gone_is_new() -> None:
    scene = Scene(1, 2, members="a nobody~1").gone("a nobody~1").slices().new("x y", NOW_S - 9)
    scene.new("b", NOW_S - 1, trained=scene.control.epoch - 1)
    assert scene.closed_world() == "x y"


# --- published and put back ---


def test_each_member_of_a_large_world_finds_its_rank_in_one_slice(store: Store) -> None:
    members = tuple(f"n{index}" for index in range(20))
    for node_id in members:
        store.arrive(node_id, 1)
    record, slices = store.large_world("e", *members)
    assert store.close(record).succeeded
    for rank, node_id in enumerate(members):
        got = store.read(requests.read_slice(store.keys, record, slices, node_id))
        found = slice_from(record, node_id, got)
        assert found is not None
        assert found.ranks[node_id] == rank
    every, problems = slices_from(store.read(store.keys.edition(1, "e").read()), 20)
    assert problems == []
    assert assemble(every, 20) == (members, True)


def test_slices_that_no_leader_may_publish_any_more_are_refused(store: Store) -> None:
    store.arrive("a", 1)
    late = replace(store.control, leader_revision=store.control.leader_revision - 1)
    slices = Slices(1, 1, "e")
    (txn,) = requests.publish_slices(store.keys, late, world(1), slices, [{"a": 0}])
    assert not store.does(txn)


def test_slices_of_failed_attempts_and_of_old_rounds_are_swept_away(store: Store) -> None:
    store.arrive("a", 1)
    for edition in ("d", "f"):
        store.large_world(edition, "a", "b")
    for number in (1, 2, 3):
        assert store.close(store.large_world("e", "a", "b")[0]).succeeded
        found = {tuple(key.split(b"/")[-3:-1]) for key in store.all_keys(store.keys.ranks)}
        assert found == {(b"%010d" % n, b"e") for n in (number - 1, number) if n}


def test_many_and_large_slices_take_several_transactions(store: Store) -> None:
    store.arrive("a", 1)
    many = [{f"n{index}": 0} for index in range(250)]
    bulky = [{f"{index}-{n}-" + 400 * "x": n for n in range(250)} for index in range(10)]
    for parts, sizes in ((many, [100, 100, 50]), (bulky, [5, 5])):
        slices = Slices(1, 1, "e")
        txns = requests.publish_slices(store.keys, store.control, world(1), slices, parts)
        assert [len(txn.success) for txn in txns] == sizes


@pytest.mark.parametrize(
    "spoil", [Delete, lambda key: Put(key, b"?", 3), lambda key: Put(key, b'{"v":1,"ranks":{}}')]
)
def test_a_member_puts_back_its_slice_only_if_it_is_not_there(
    store: Store, spoil: Callable[[bytes], Op]
) -> None:
    store.arrive("a", 1)
    record, slices = store.large_world("e", "a", "b")
    assert store.close(record).succeeded
    mine = Slice(record.run, 1, slices.index_of("a"), {"a": 0, "b": 1})
    before, there = store.all_keys(), store.read(store.keys.ranks.read()).kvs

    def put_back() -> None:
        revision = store.presence("a").mod_revision
        back = requests.restore_presence(
            store.keys, store.control, info("a"), 1, mine, presence_revision=revision
        )
        assert store.does(back)

    put_back()
    assert store.read(store.keys.ranks.read()).kvs == there
    for kv in there:
        store.do(Txn((), (spoil(kv.key),)))
    put_back()
    got = store.read(requests.read_slice(store.keys, record, slices, "a"))
    assert slice_from(record, "a", got) == mine
    assert store.all_keys() <= before
