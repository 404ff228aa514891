"""What shows that etcd has gone back, whatever its revision says."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_etcd.protocol.model import Accusation, Accused, Control, NodeInfo, Nodes, Presence
from rdzv_etcd.protocol.views import control_went_back, nodes_went_back
from rdzv_etcd.settings import JobSettings

INFO = NodeInfo("a", "host-a", 2000, 1, JobSettings(1, 2))


def present(revision: int, at: int) -> Nodes:
    return Nodes(revision, {"a": Presence(INFO, at, at, 0.0)})


def accused(revision: int, at: int) -> Nodes:
    return Nodes(revision, accused={"a": Accused(Accusation("b", "gone", True), at, 0.0)})


@pytest.mark.parametrize(
    ("before", "now", "went_back"),
    [
        (present(20, 10), present(30, 10), False),
        (present(20, 10), present(30, 25), False),
        (present(20, 10), accused(30, 25), False),
        (present(20, 10), Nodes(30), False),  # gone
        (accused(20, 10), accused(30, 10), False),
        (Nodes(20), present(30, 25), False),
        (Nodes(20), accused(30, 15), True),
        (present(20, 10), accused(30, 9), True),
        (present(20, 10), present(1_000_000, 8), True),
        (present(20, 10), present(15, 12), True),
    ],
)
def test_nodes(before: Nodes, now: Nodes, went_back: bool) -> None:
    assert nodes_went_back(before, now) is went_back


@pytest.mark.parametrize("key", ["round", "leader", "change", "ended"])
@pytest.mark.parametrize(
    ("before", "now", "went_back"),
    [
        ((20, 10), (30, 10), False),
        ((20, 10), (30, 25), False),
        ((20, 10), (30, 0), False),  # gone
        ((20, 0), (30, 15), False),  # shown as gone ahead of the watch
        ((20, 40), (30, 10), False),  # shown ahead of the watch; this was read before
        ((20, 10), (30, 9), True),
    ],
)
def test_control(key: str, before: tuple[int, int], now: tuple[int, int], went_back: bool) -> None:
    def view(revision: int, at: int) -> Control:
        fields: dict[str, Any] = {f"{key}_revision": at}
        return Control(revision, **fields)

    assert control_went_back(view(*before), view(*now)) is went_back
