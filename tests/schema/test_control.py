"""How the view of the control keys follows what a watch tells."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.core.model import Change, Control, Drain
from rdzv_etcd.etcd.api import Event, EventKind, GetResult, KeyValue
from rdzv_etcd.schema import values
from rdzv_etcd.schema.control import control_after, control_from
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


def drain_at(node_id: str, value: bytes, revision: int) -> KeyValue:
    return KeyValue(KEYS.drain(node_id), value, 1, revision, 1, 7)


def test_drains_come_and_go_one_by_one_and_what_is_none_stops_nothing() -> None:
    one, two = Drain("a~1~x", "SIGUSR1", 5), Drain("an operator", "maintenance")
    first, second = map(values.encode_drain, (one, two))
    change = KeyValue(KEYS.change, values.encode_change(NEW), 1, 3, 1)
    kvs = (change, drain_at("a~1~x", first, 4), drain_at("b~2~x", b"?", 5))
    view = control_from(KEYS, GetResult(9, kvs, 3))
    assert (view.drains, view.change) == ({"a~1~x": one}, NEW)
    put_it = Event(EventKind.PUT, drain_at("b~2~x", second, 11))
    deleted = Event(EventKind.DELETE, drain_at("a~1~x", b"", 12))
    spoilt = Event(EventKind.PUT, drain_at("b~2~x", b"{}", 13))
    old = Event(EventKind.DELETE, drain_at("a~1~x", b"", 8))
    assert control_after(KEYS, view, 8, [old]).drains == {"a~1~x": one}
    after = control_after(KEYS, view, 12, [put_it, deleted])
    assert after.drains == {"b~2~x": two}
    assert view.drains == {"a~1~x": one}
    assert control_after(KEYS, after, 13, [spoilt]).drains == {}
