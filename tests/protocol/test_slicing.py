"""Large worlds in slices: cut and assembled, nobody is lost, and who is unknown is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.census import take_census
from rdzv_etcd.protocol.model import Slices
from rdzv_etcd.protocol.ranks import assemble, cut, slices_for
from tests.protocol.scenes import NOW_S, Scene

MEMBERS = st.lists(st.text(min_size=1, max_size=12), unique=True, min_size=1, max_size=60).map(
    tuple
)


@given(MEMBERS, st.integers(1, 20))
def test_what_was_cut_is_assembled(members: tuple[str, ...], slice_nodes: int) -> None:
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
def test_who_has_not_asked_again_may_be_an_unknown_member(members: str) -> None:
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
    """It says itself that it was in the world: a new one without it would begin again."""
    scene = Scene(1, 2, members="a nobody~1").gone("a nobody~1").slices().new("x y", NOW_S - 9)
    scene.new("b", NOW_S - 1, trained=scene.control.epoch)
    assert scene.closed_world() == "b x"


def test_who_was_in_an_earlier_world_than_the_one_whose_slice_is_gone_is_new() -> None:
    scene = Scene(1, 2, members="a nobody~1").gone("a nobody~1").slices().new("x y", NOW_S - 9)
    scene.new("b", NOW_S - 1, trained=scene.control.epoch - 1)
    assert scene.closed_world() == "x y"
