"""What holds for every decision, whatever the view."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from rdzv_etcd.protocol.closing import Close, KeepWaiting, decide_close
from rdzv_etcd.protocol.model import Change, Closure, Control, NodeInfo, Nodes, Presence, Round
from rdzv_etcd.protocol.ranks import assign_ranks
from rdzv_etcd.protocol.segments import Segment
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import TIMING

IDS = [f"n{i}" for i in range(9)]
OTHER = JobSettings(1, 99)


@st.composite
def job_settings(draw: st.DrawFn) -> JobSettings:
    unit = draw(st.sampled_from([1, 1, 2, 3]))
    least = draw(st.integers(1, 5))
    most = draw(st.integers(max(least, -(-least // unit) * unit), 8))
    return JobSettings(least, most, unit)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Control, Nodes, JobSettings]:
    settings = draw(job_settings())
    ids = draw(st.permutations(IDS))
    number = draw(st.integers(1, 4))
    record = None
    if draw(st.booleans()):
        unit = settings.node_unit
        sizes = [n for n in range(settings.min_nodes, settings.max_nodes + 1) if n % unit == 0]
        size = draw(st.sampled_from(sizes))
        expelled = tuple(node for node in ids[size:] if draw(st.booleans()))
        closure = Closure("n0", "done", True, 0.0) if draw(st.integers(0, 5)) == 0 else None
        record = Round(
            number,
            "run",
            tuple(ids[:size]),
            settings,
            "h",
            1,
            7,
            expelled=expelled,
            closure=closure,
        )
    present = {}
    for index, node_id in enumerate(ids):
        if not draw(st.booleans()):
            continue
        arrived_for = draw(st.integers(1, number + 1)) if record is not None else 1
        rank_key = None
        info = NodeInfo(
            node_id,
            "h",
            1,
            arrived_for,
            OTHER if draw(st.integers(0, 9)) == 0 else settings,
            rank_key,
            "bye" if draw(st.integers(0, 9)) == 0 else None,
            finished=draw(st.integers(0, 9)) == 0,
        )
        present[node_id] = Presence(info, 10 + index, 40 + index, draw(st.floats(0, 100)))
    change = None
    if record is not None and draw(st.booleans()):
        lost = {node: "lease expired" for node in record.members if draw(st.booleans())}
        change = Change("run", number, (), lost)
    left = {node: "enough" for node in ids if node not in present and draw(st.booleans())}
    control = Control(100, record, draw(st.integers(35, 55)), None, 0, change, 30)
    return control, Nodes(100, present, left), settings


@given(scenes(), st.floats(0, 200))
def test_a_closed_round_keeps_the_jobs_limits_and_prefers_members(
    scene: tuple[Control, Nodes, JobSettings], now_s: float
) -> None:
    control, nodes, settings = scene
    decision = decide_close(control, nodes, settings, TIMING, now_s, opened_s=0.0)
    if isinstance(decision, KeepWaiting):
        assert decision.until_s is None or decision.until_s > now_s
        return
    ids = [node.node_id for node in decision.world]
    size = len(ids)
    assert len(set(ids)) == size
    assert not any(node.finished for node in decision.world)
    assert settings.min_nodes <= size <= settings.max_nodes
    assert size % settings.node_unit == 0
    record = control.formed
    for node in decision.world:
        presence = nodes.present[node.node_id]
        assert presence.info is node
        assert node.leaving is None
        is_member = record is not None and node.node_id in record.members
        assert node.settings == settings or is_member
        if is_member and record is not None:
            assert node.arrived_for > record.number
    if record is None:
        return
    back = [
        node_id
        for node_id in record.members
        if node_id in nodes.present
        and nodes.present[node_id].info.leaving is None
        and not nodes.present[node_id].info.finished
        and nodes.present[node_id].info.arrived_for > record.number
    ]
    newcomers = [node_id for node_id in ids if node_id not in record.members]
    assert not newcomers or set(back) <= set(ids)
    assert not set(decision.expelled) & set(ids)
    working = {  # live members that are not back may still work on the old round
        node_id
        for node_id in record.members
        if node_id in nodes.present
        and nodes.present[node_id].info.leaving is None
        and not nodes.present[node_id].info.finished
        and node_id not in back
    }
    assert working <= set(decision.expelled)


@given(scenes())
def test_a_round_that_can_be_closed_is_closed_after_its_wait(
    scene: tuple[Control, Nodes, JobSettings],
) -> None:
    control, nodes, settings = scene
    decision = decide_close(control, nodes, settings, TIMING, 50.0, opened_s=0.0)
    if isinstance(decision, KeepWaiting) and decision.until_s is not None:
        later = decide_close(control, nodes, settings, TIMING, decision.until_s, opened_s=0.0)
        assert isinstance(later, Close)


@given(st.permutations(IDS), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_survivors_keep_their_ranks_where_possible(
    ids: list[str], before: int, survivors: int, size: int
) -> None:
    previous = {node_id: rank for rank, node_id in enumerate(ids[:before])}
    old = ids[:before][: min(survivors, size)]
    new = ids[before:][: max(0, size - len(old))]
    assume(old or new)
    chosen = [NodeInfo(node_id, "h", 1, 1, OTHER) for node_id in [*sorted(old), *new]]
    world = [node.node_id for node in assign_ranks([Segment(tuple(chosen), 0)], previous)]
    assert sorted(world) == sorted([*old, *new])
    stay = [node_id for node_id in old if previous[node_id] < len(world)]
    moved = [node_id for node_id in stay if world[previous[node_id]] != node_id]
    assert len(moved) <= 1  # one may move to rank 0
    if moved:
        assert world[0] == moved[0]
    if old:
        assert world[0] in old
