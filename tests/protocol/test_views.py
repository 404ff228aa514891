"""How the views follow reads and watches, and what shows that etcd has gone back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.etcd.port import Delete, Event, EventKind, GetResult, KeyValue, Txn
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import (
    Accusation,
    Accused,
    Change,
    Control,
    Drain,
    NodeInfo,
    Nodes,
    Presence,
)
from rdzv_etcd.protocol.views import (
    control_after,
    control_from,
    control_went_back,
    nodes_after,
    nodes_from,
    nodes_went_back,
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing import MemoryEtcd
from tests.protocol.store import JOB_LEASE, Store, info, world

KEYS = JobKeys("/rdzv_etcd", "job")
OLD, NEW = Change("run", 1, ("a",)), Change("run", 2, ("b",))


def put(change: Change, revision: int) -> Event:
    value = values.encode_change(change)
    return Event(EventKind.PUT, KeyValue(KEYS.change, value, 1, revision, 1))


def test_news_older_than_what_a_node_has_written_itself_changes_nothing() -> None:
    """The node shows its own write at once; the watch, which lags, brings earlier changes."""
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


def test_drains_come_and_go_one_by_one_and_a_foreign_value_stops_nothing() -> None:
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


def test_views_built_from_a_read_and_from_the_watch_are_the_same() -> None:
    async def scenario() -> None:
        async with MemoryEtcd() as server:
            etcd = server.connect()
            keys = JobKeys("/p", "job")
            session = (await etcd.grant(60)).lease_id
            await etcd.grant(60, lease_id=JOB_LEASE)

            async def read() -> tuple[Control, Nodes]:
                control = control_from(keys, await etcd.get(keys.control.read()))
                return control, nodes_from(keys, await etcd.get(keys.nodes.read()), 0.0, nodes)

            nodes = None
            control, nodes = await read()
            watch = etcd.watch(keys.below.start, keys.below.end, start_revision=server.revision + 1)
            await etcd.txn(requests.arrive(keys, info("a"), session, control))
            await etcd.txn(requests.arrive(keys, info("b"), session, control))
            now, _ = await read()
            await etcd.txn(requests.close_round(keys, now, server.revision, world(1, "a"), {}))
            leaving = replace(info("b"), leaving="SIGTERM")
            await etcd.txn(requests.say_goodbye(keys, leaving, session))
            _, nodes_before = await read()
            await etcd.txn(Txn((), (Delete(keys.node("b")), Delete(keys.change))))
            last = server.revision
            batches = []
            async for batch in watch:
                batches.append(batch)
                if batch.revision >= last:
                    break
            first = nodes
            for batch in (*batches, *batches):  # shown twice: nothing changes
                events = [event for event in batch.events if event.kv.key in keys.control]
                control = control_after(keys, control, batch.revision, events)
                events = [event for event in batch.events if event.kv.key in keys.nodes]
                first = nodes_after(keys, first, batch.revision, events, 0.0)
            nodes = nodes_before
            assert (control, first) == await read()
            assert first.left == {"b": "SIGTERM"}
            await watch.close()

    asyncio.run(scenario())


def test_a_fresh_read_makes_no_wait_begin_again(store: Store) -> None:
    store.arrive("a", 1)
    nodes = store.nodes(10.0)
    store.arrive("b", 2)
    nodes = store.nodes(20.0, nodes)
    assert [nodes.present[name].seen_s for name in "ab"] == [10.0, 20.0]
    store.arrive("a", 1)
    assert store.nodes(30.0, nodes).present["a"].seen_s == 30.0


def test_a_view_knows_since_when_a_node_has_been_absent(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    nodes = store.nodes(10.0)
    assert nodes.absent_since_s("never seen") == 10.0

    def without(name: str, now_s: float) -> Nodes:
        kv = KeyValue(store.keys.node(name), b"", 1, nodes.revision + 1, 1)
        event = Event(EventKind.DELETE, kv)
        return nodes_after(store.keys, nodes, kv.mod_revision, [event], now_s)

    nodes = without("a", 20.0)
    assert nodes.absent_since_s("a") == 20.0
    # A fresh read changes nothing, and notices nodes that went while nothing watched.
    store.revoke(1)
    store.revoke(2)
    nodes = store.nodes(21.0, nodes)
    assert [nodes.absent_since_s(name) for name in "abc"] == [20.0, 21.0, 10.0]
    nodes = without("c", 60.0)
    assert dict(nodes.gone) == {"c": 60.0}  # the others went long ago


# --- a loss of data ---

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
