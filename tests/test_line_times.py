"""When the lines about a wait are logged."""

from __future__ import annotations

from rdzv_etcd.log import LineTimes


def test_waits_are_told_soon_and_then_rarely() -> None:
    lines = LineTimes()
    told = [waited_s for waited_s in range(700) if lines.is_due(waited_s)]
    assert told == [10, 30, 60, 360, 660]


def test_a_node_that_was_stopped_tells_one_line_instead_of_several() -> None:
    lines = LineTimes()
    assert [lines.is_due(waited_s) for waited_s in (9.9, 400.0, 401.0, 660.0)] == [
        False, True, False, True,
    ]  # fmt: skip
