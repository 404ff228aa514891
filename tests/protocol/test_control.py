"""How the view of the control keys follows what a watch tells."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.etcd.port import Event, EventKind, GetResult, KeyValue
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Change, Control, Drain, NodeInfo
from rdzv_etcd.protocol.views import control_after, control_from, nodes_after, nodes_from
from rdzv_etcd.settings import JobSettings

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


def test_presences_older_than_what_was_read_change_nothing() -> None:
    """A watch begins before the read beside it. A leader that folded its first events in again
    would decide on what was, and the guard of its write, the view's revision, would not see it."""
    key, job = KEYS.node("a~1~x"), JobSettings(1, 2)

    def arrived(number: int, revision: int) -> KeyValue:
        info = NodeInfo("a~1~x", "10.0.0.1", 2000, number, job)
        return KeyValue(key, values.encode_node(info), 3, revision, 1, 7)

    view = nodes_from(KEYS, GetResult(10, (arrived(2, 9),), 1), 0.0)
    older = (
        Event(EventKind.PUT, arrived(1, 8)),
        Event(EventKind.DELETE, KeyValue(key, b"", 0, 7, 0)),
    )
    assert nodes_after(KEYS, view, 10, older, 1.0) == view
    after = nodes_after(KEYS, view, 11, [Event(EventKind.PUT, arrived(3, 11))], 1.0)
    assert after.present["a~1~x"].info.arrived_for == 3


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
