"""Why a world is over, as its member is told."""

from __future__ import annotations

import pytest

from rdzv_etcd.core.over import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Lost({"a~1~x": "lease expired", "b~2~y": "?"}), "a lost (lease expired), b lost (?)"),
        (Left({"a~1~x": "SIGTERM", "b~2~y": "left"}), "a left: SIGTERM, b left"),
        (Waiting(("a~1~x", "b~2~y")), "a, b waiting"),
        (Expelled(), "the others went on without this node"),
        (MovedOn(), "this node has joined again, or has left"),
        (Finished("a~1~x", "done"), "a finished the job: done"),
        (Failed("a~1~x", "no data"), "a gave the job up: no data"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_reads_as_a_sentence(change: WorldChange, sentence: str) -> None:
    assert str(change) == sentence
