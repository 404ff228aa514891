"""How the view of the control keys follows what a watch tells."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.core.model import Change, Control
from rdzv_etcd.etcd.api import Event, EventKind, KeyValue
from rdzv_etcd.schema import values
from rdzv_etcd.schema.control import control_after
from rdzv_etcd.schema.keys import JobKeys

KEYS = JobKeys("/rdzv_etcd", "job")
OLD, NEW = Change("run", 1, ("a",)), Change("run", 2, ("b",))


def put(change: Change, revision: int) -> Event:
    value = values.encode_change(change)
    return Event(EventKind.PUT, KeyValue(KEYS.change, value, 1, revision, 1))


def test_news_older_than_what_a_node_has_written_itself_changes_nothing() -> None:
    """The node shows its own write at once; the watch, which lags, tells what came before it."""
    view = Control(10, change=NEW, change_revision=10)
    deleted = Event(EventKind.DELETE, KeyValue(KEYS.change, b"", 0, 9, 0))
    assert control_after(KEYS, view, 9, [put(OLD, 8), deleted]) == view
    assert control_after(KEYS, view, 10, [put(NEW, 10)]) == view
    assert control_after(KEYS, view, 11, [put(OLD, 11)]) == replace(
        view, revision=11, change=OLD, change_revision=11
    )
