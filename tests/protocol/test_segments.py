"""Segments: which nodes of a domain are in a world together, at which ranks, and when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_etcd.protocol.closing import Close, KeepWaiting
from rdzv_etcd.protocol.model import Accusation, NodeInfo, Round
from rdzv_etcd.protocol.ranks import assign_ranks
from rdzv_etcd.protocol.segments import Segment, choose, incomplete, ranks_in, sizes_of_domains
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import WHOLE_DOMAIN
from tests.protocol.scenes import NOW_S, Scene


def formed(members: list[str], settings: JobSettings, domains: dict[str, int]) -> Round | None:
    if not members:
        return None
    return Round(1, "run", tuple(members), settings, "h", 1, 1, domains=domains)


def world(
    candidates: str,
    before: str = "",
    *,
    size: int = 2,
    most: int = 96,
    domains: dict[str, int] | None = None,
) -> str:
    """The first letter of a name is the domain; behind a colon is the rank key."""
    settings = JobSettings(size or 1, most, 1, size)
    nodes = []
    for word in candidates.split():
        name, _, key = word.partition(":")
        nodes.append(NodeInfo(name, "h", 1, 1, settings, key or None, domain=name[0]))
    record = formed(before.split(), settings, domains or {})
    chosen = choose(nodes, settings, record)
    if not chosen:
        return ""
    return " ".join(node.node_id for node in assign_ranks(chosen, ranks_in(record)))


ABC = "a1 a2 b1 b2 c1 c2"


@pytest.mark.parametrize(
    ("candidates", "before", "expected"),
    [
        ("b1 a1 a2 b2 a3", "", "a1 a2 b1 b2"),  # natural order of the domains
        ("a1 b1 c1", "", ""),
        ("a3 a1 a2 a4 a5", "", "a3 a1 a2 a4"),  # within one: as they arrived
        ("a1 a2 b1 b2 c1 c2", ABC, ABC),
        ("c2 b1 a2 c1 a1 b2", ABC, ABC),
        ("a1 a2 b2 c1 c2 b3", ABC, "a1 a2 b3 b2 c1 c2"),  # a spare of the domain, in its place
        ("a1 a2 b2 c1 c2 d1 d2", ABC, "a1 a2 d1 d2 c1 c2"),  # a whole spare segment
        ("a1 a2 b2 c1 c2 b3 d1 d2", ABC, "a1 a2 b3 b2 c1 c2 d1 d2"),
        ("a1 a2 b2 c1 c2 d1", ABC, "a1 a2 c1 c2"),  # the highest moves
        ("a1 b1 b2 c1 c2", ABC, "c1 c2 b1 b2"),
        ("a2 b1 b2 c1 c2 a3", ABC, "a2 a3 b1 b2 c1 c2"),  # rank 0 is a survivor
        ("a2 b1 b2 c1 c2 d1 d2", ABC, "c1 c2 b1 b2 d1 d2"),
        ("a1 a4", "a1 a2 a3 a4", "a1 a4"),  # what is left of two segments of a domain
        ("a2 a3 a4", "a1 a2 a3 a4", "a3 a4"),
        ("a1 a3 a4 a5", "a1 a2 a3 a4", "a1 a5 a3 a4"),
        ("d1 d2 e1 e2", ABC, "d1 d2 e1 e2"),  # nobody survived
    ],
)
def test_whole_segments_keep_their_ranks(candidates: str, before: str, expected: str) -> None:
    assert world(candidates, before) == expected


def test_domains_order_naturally() -> None:
    settings = JobSettings(2, 6, 1, 2)
    racks = ["rack10", "rack10", "rack9", "rack9", "rack1", "rack1"]
    nodes = [NodeInfo(f"n{at}", "h", 1, 1, settings, domain=rack) for at, rack in enumerate(racks)]
    found = assign_ranks(choose(nodes, settings, None), {})
    assert [node.domain for node in found] == racks[::-1]


def test_the_first_that_are_whole_get_the_seats() -> None:
    assert world("c1 a1 c2 b1 b2 a2", most=4) == "b1 b2 c1 c2"
    assert world("a1 a2 b1 b2 c1 c2 d1 d2", "c1 c2 d1 d2", most=4) == "c1 c2 d1 d2"


@pytest.mark.parametrize(
    ("candidates", "before", "expected"),
    [
        ("a2:1 b1:9 a1:0 b2:10", "", "a1 a2 b1 b2"),
        ("a3:3 a1:1 a2:2 a0:0 a9:9", "", "a0 a1 a2 a3"),  # of those that are taken
        ("b1:0 b2:1 c2:0 c1:1", "b1 b2 c2 c1", "b1 b2 c2 c1"),
        ("b1:0 b3:1 c2:0 c1:1", "b1 b2 c2 c1", "b1 b3 c2 c1"),
        ("b2:1 b3:0 c2:0 c1:1", "b1 b2 c2 c1", "c2 c1 b3 b2"),  # rank 0 is a survivor
        ("b2:1 b3:0", "b1 b2", "b3 b2"),  # unless the keys forbid that
    ],
)
def test_rank_keys_order_the_nodes_of_a_segment(
    candidates: str, before: str, expected: str
) -> None:
    assert world(candidates, before) == expected


AB = "a1 a2 b1 b2 b3 d1"


@pytest.mark.parametrize(
    ("candidates", "before", "expected"),
    [
        ("b1 a1 b2 a2 b3", "", "a1 a2 b1 b2 b3"),
        ("a1 a2 b1 b2 d1", AB, "a1 a2 d1"),
        ("a1 a2 b1 b2 d1 b4", AB, "a1 a2 b1 b2 b4 d1"),
        ("a1 a2 b1 b2 d1 c1 c2 c3", AB, "a1 a2 c1 c2 c3 d1"),  # as large as what is gone
        ("a1 a2 b1 b2 d1 c1 c2", AB, "a1 a2 d1"),  # c had three in a world before
        ("a2 b1 b2 b3 d1", AB, "d1 b1 b2 b3"),
    ],
)
def test_a_whole_domain_or_nothing(candidates: str, before: str, expected: str) -> None:
    domains = {"a": 2, "b": 3, "d": 1, "c": 3} if before else {}
    assert world(candidates, before, size=WHOLE_DOMAIN, domains=domains) == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(4, "a1 a2 b1 b2"), (5, "a1 a2 b1 b2 b3"), (6, "a1 a2 b1 b2 b3")]
)
def test_more_nodes_of_a_domain_are_spares_unless_all_fit(most: int, expected: str) -> None:
    domains = {"a": 2, "b": 2}
    before, here = "a1 a2 b1 b2", "a1 a2 b1 b2 b3"
    assert world(here, before, size=WHOLE_DOMAIN, most=most, domains=domains) == expected


def test_of_whole_domains_those_that_fill_most_seats_are_chosen() -> None:
    a, b, c = "a1 a2 a3", "b1 b2", "c1 c2"
    assert world(f"{a} {b} {c}", size=WHOLE_DOMAIN, most=4) == f"{b} {c}"
    assert world(f"{a} {b} {c}", size=WHOLE_DOMAIN, most=5) == f"{a} {b}"
    domains = {"a": 3}
    assert world(f"{a} {b} {c}", a, size=WHOLE_DOMAIN, most=4, domains=domains) == a  # survivors


def test_a_node_that_shows_another_domain_than_before_stops_nobody() -> None:
    """No node of this library does; a presence may be another program's."""
    settings = JobSettings(2, 8, 1, 2)
    domains = dict(zip(["a1", "a2", "b1", "b2", "a3", "b3"], "abbbab", strict=True))
    nodes = [NodeInfo(name, "h", 1, 1, settings, domain=at) for name, at in domains.items()]
    record = formed(["a1", "a2", "b1", "b2"], settings, {})
    found = assign_ranks(choose(nodes, settings, record), ranks_in(record))
    assert [node.domain for node in found] == ["a", "a", "b", "b", "b", "b"]


def test_a_node_without_a_domain_gets_no_seat() -> None:
    scene = Scene(2, 4, segment=2).new("a1 a2").new("x", settings=JobSettings(2, 4))
    assert "not counting x" in scene.close().reason
    assert scene.closed_world(NOW_S + 30) == "a1 a2"


def test_the_record_remembers_how_many_nodes_each_domain_had() -> None:
    settings = JobSettings(1, 9, 1, WHOLE_DOMAIN)
    names = ["a1", "a2", "b1", "c1", "c2"]
    nodes = [NodeInfo(name, "h", 1, 1, settings, domain=name[0]) for name in names]
    record = formed(["b1", "a1"], settings, {"b": 1, "a": 3, "d": 4})
    chosen = assign_ranks(choose(nodes, settings, record), ranks_in(record))
    sizes = sizes_of_domains(chosen, settings, record)
    assert list(sizes.items()) == [("b", 1), ("c", 2), ("a", 3), ("d", 4)]
    assert sizes_of_domains(chosen, JobSettings(2, 4, 1, 2), record) == {}
    assert incomplete(nodes, settings, record) == {"a": (2, 3)}


# --- when ----------------------------------------------------------------------------------------


def test_a_first_round_waits_for_whole_segments() -> None:
    scene = Scene(4, 4, segment=2).new("a1 b1 a2 c1")
    assert not isinstance(scene.close(), Close)
    assert scene.close().reason == (
        "round 6: 4 of 4 nodes here: a1, b1, a2, c1; b: 1 of 2, waits for one more; c: 1 of 2, "
        "waits for one more"
    ).replace("round 6", f"round {scene.control.next_number}")
    assert scene.new("c2").closed_world() == "a1 a2 c1 c2"


def test_the_last_call_begins_with_the_smallest_world_of_whole_segments() -> None:
    scene = Scene(2, 6, segment=2).new("a1 b1", NOW_S - 20).new("b2", NOW_S - 4)
    scene.opened_s = NOW_S - 90
    decision = scene.close()
    assert not isinstance(decision, Close)
    assert decision.until_s == NOW_S + 26
    assert scene.closed_world(NOW_S + 26) == "b1 b2"


FOUR = "a1 a2 b1 b2"


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        (Scene(2, 6, members=FOUR, segment=2).new("c1"), None),  # disturbs nobody
        (Scene(2, 6, members=FOUR, segment=2).new("c1 d1"), None),
        (Scene(2, 6, members=FOUR, segment=2).new("c1 c2"), ("c1 c2", {})),
        (Scene(2, 6, members=FOUR, segment=2).spare("a3").new("a4"), ("a3 a4", {})),
        (Scene(2, 4, members=FOUR, segment=2).new("c1 c2"), None),
        (Scene(2, 6, members=FOUR, segment=2).new("c1 c2").gone("a2", 0.0), None),  # it may return
        (Scene(2, 6, members=FOUR, segment=2).gone("a2"), ("", {"a2": "lease expired"})),
        (Scene(2, 6, members=FOUR, segment=2).finished("a1 a2").new("c1 c2"), None),
        (Scene(2, 6, members=FOUR, segment=2).finished("a1").new("c1 c2 d1 d2"), None),
        (
            Scene(1, 6, members="a1 a2 a3", segment=0, domains={"a": 3})
            .finished("a1")
            .new("b1 b2 b3 b4"),
            None,
        ),
        (
            Scene(1, 6, members="a1 a2 b1", segment=0, domains={"a": 2, "b": 1, "c": 2}).new("c1"),
            None,
        ),
        (
            Scene(1, 6, members="a1 a2 b1", segment=0, domains={"a": 2, "b": 1, "c": 2}).new(
                "c1 c2"
            ),
            ("c1 c2", {}),
        ),
    ],
)
def test_only_whole_segments_end_a_world(
    scene: Scene, expected: tuple[str, dict[str, str]] | None
) -> None:
    assert scene.published() == expected


def test_what_is_left_of_a_broken_segment_waits() -> None:
    scene = Scene(2, 4, members=FOUR, segment=2).gone("b1").changed("b1").back("a1 a2 b2")
    decision = scene.close(NOW_S + 1)
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["a1", "a2"]
    assert decision.reason == "all surviving members rejoined; b: 1 of 2, waits for one more"
    assert decision.expelled == ()


@pytest.mark.parametrize("segment", [2, WHOLE_DOMAIN])
def test_nobody_waits_for_an_accused_node_whose_segment_is_broken(segment: int) -> None:
    """All processes of a host are killed at once, and the second is asked whether it lives."""
    six = f"{FOUR} c1 c2"
    domains = {"a": 2, "b": 2, "c": 2}
    silent = Accusation("a2", "does not answer", is_certain=False)

    def at_work(gone: str, lost: str, back: str) -> Scene:
        scene = Scene(2, 6, members=six, segment=segment, domains=domains)
        return scene.gone(gone).changed(lost).back(back)

    survivors = "a1 a2 c1 c2"
    asked = at_work("b1 b2", "b1", survivors).accused("b2", silent, 0.0)
    assert asked.closed_world(NOW_S + 0.1) == survivors
    for waits in (
        at_work("b1 b2", "b1", survivors).accused("b2", silent, 0.0).new("b3"),  # b2 may be with it
        at_work("b1 c2", "b1", "a1 a2 b2 c1").accused("c2", silent, 0.0),  # of another segment
    ):
        assert isinstance(waits.close(NOW_S + 0.1), KeepWaiting)
        assert isinstance(waits.close(NOW_S + 1), Close)


def test_two_broken_segments_of_a_domain_may_make_a_whole_one() -> None:
    silent = Accusation("b1", "does not answer", is_certain=False)
    scene = Scene(2, 6, members="a1 a2 a3 a4 b1 b2", segment=2).gone("a1 a3 a4").changed("a1 a3")
    waits = scene.back("a2 b1 b2").accused("a4", silent, 0.0)  # a2 and a4 would have seats
    assert isinstance(waits.close(NOW_S + 0.1), KeepWaiting)
    scene = Scene(2, 6, members="a1 a2 a3 a4 b1 b2", segment=2).gone("a1 a2").left("a3")
    waits = scene.changed("a1").back("a4 b1 b2").accused("a2", silent, 0.0)  # as before
    assert isinstance(waits.close(NOW_S + 0.1), KeepWaiting)


def test_nobody_waits_for_what_is_left_of_a_broken_segment() -> None:
    """All processes of a host are killed at once, and one is found to be gone first."""
    six = f"{FOUR} c1 c2"

    def lost(gone: str, back: str) -> Scene:
        return Scene(2, 6, members=six, segment=2).gone(gone).changed(gone).back(back)

    assert lost("b1", "a1 a2 c1 c2").closed_world(NOW_S + 1) == "a1 a2 c1 c2"
    for waits in (
        lost("b1", "a1 a2 c1"),  # c2 would be in it
        lost("b1", "a1 a2 c1 c2").new("b3"),  # with b3, b2 would be; and then no survivor is:
        Scene(2, 6, segment=2, members="a1 a2").gone("a1").changed("a1").new("c1 c2"),
    ):
        assert not isinstance(waits.close(NOW_S + 1), Close)


# --- any -----------------------------------------------------------------------------------------

DOMAINS = st.sampled_from("abc")


@given(
    st.lists(DOMAINS, max_size=24),
    st.integers(2, 4),
    st.integers(1, 6),
    st.sets(st.integers(0, 23)),
    st.lists(DOMAINS, max_size=8),
)
def test_as_many_whole_segments_as_fit_and_the_others_stay(
    first: list[str], size: int, segments: int, lost: set[int], later: list[str]
) -> None:
    settings = JobSettings(size, size * segments, 1, size)

    def nodes(domains: list[str], word: str) -> list[NodeInfo]:
        return [
            NodeInfo(f"{word}{at}", "h", 1, 1, settings, domain=domain)
            for at, domain in enumerate(domains)
        ]

    def check(candidates: list[NodeInfo], chosen: list[Segment], found: list[NodeInfo]) -> None:
        blocks = [found[at : at + size] for at in range(0, len(found), size)]
        assert all(len({node.domain for node in block}) == 1 for block in blocks)
        per_domain = Counter(node.domain for node in candidates)
        possible = sum(count // size for count in per_domain.values())
        assert len(blocks) == len(chosen) == min(segments, possible)
        assert len({node.node_id for node in found}) == len(found)

    everyone = nodes(first, "first")
    chosen = choose(everyone, settings, None)
    if not chosen:
        return
    before = list(assign_ranks(chosen, {}))
    check(everyone, chosen, before)

    record = formed([node.node_id for node in before], settings, {})
    ranks = ranks_in(record)
    members = [node for rank, node in enumerate(before) if rank not in lost]
    others = [node for node in everyone if node not in before] + nodes(later, "later")
    chosen = choose([*members, *others], settings, record)
    if not chosen:
        return
    after = list(assign_ranks(chosen, ranks))
    check([*members, *others], chosen, after)
    survivors = [node for node in after if node.node_id in ranks]
    assert not survivors or after[0] in survivors
    if len(after) >= len(before) and (0 not in lost):
        whole = [
            place
            for place in range(len(before) // size)
            if not lost & set(range(place * size, (place + 1) * size))
        ]
        for place in whole:
            block = slice(place * size, (place + 1) * size)
            assert after[block] == before[block]
