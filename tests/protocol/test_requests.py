"""Every transaction of the protocol on the in-memory etcd: when it succeeds, and what it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Event,
    EventKind,
    Get,
    GetResult,
    KeyValue,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import (
    Accusation,
    Accused,
    Change,
    Closure,
    Control,
    Ended,
    Leader,
    NodeInfo,
    Nodes,
    Round,
    Slice,
    Slices,
)
from rdzv_etcd.protocol.ranks import assemble, cut
from rdzv_etcd.protocol.views import (
    control_after,
    control_from,
    nodes_after,
    nodes_from,
    slice_from,
    slices_from,
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing import MemoryEtcd, Model
from rdzv_etcd.testing.model import Grant, Revoke
from rdzv_etcd.world_change import Loss

SETTINGS = JobSettings(1, 20)
JOB_LEASE = 77


class Store:
    """An etcd without time, and short ways to act on it."""

    def __init__(self) -> None:
        self.model = Model()
        self.keys = JobKeys("/p", "job/1")
        for lease in (1, 2, 3, JOB_LEASE):
            self.model.step(Grant(60, lease))

    def do(self, txn: Txn) -> TxnResult:
        assert max(len(txn.guards), len(txn.success), len(txn.failure)) <= 128
        result = self.model.step(txn)
        assert isinstance(result, TxnResult)
        return result

    def read(self, get: Get) -> GetResult:
        result = self.model.step(get)
        assert isinstance(result, GetResult)
        return result

    @property
    def control(self) -> Control:
        return control_from(self.keys, self.read(requests.read_control(self.keys)))

    @property
    def nodes_revision(self) -> int:
        return self.read(requests.read_nodes(self.keys)).revision

    def here(self) -> set[str]:
        nodes = nodes_from(self.keys, self.read(requests.read_nodes(self.keys)), 0.0)
        return set(nodes.present)

    def all_keys(self) -> set[bytes]:
        keys = self.keys.below
        return {kv.key for kv in self.read(Get(keys.start, keys.end)).kvs}

    def arrive(self, name: str, session: int, arrived_for: int | None = None) -> TxnResult:
        number = self.control.next_number if arrived_for is None else arrived_for
        revision = self.control.round_revision
        return self.do(requests.arrive(self.keys, info(name, number), session, revision))

    def form(self, *members: str) -> Round:
        record = world(self.control.next_number, *members)
        result = self.do(
            requests.close_round(
                self.keys, self.control, self.nodes_revision, record, {"round": record.number}
            )
        )
        assert result.succeeded
        return record


def info(name: str, arrived_for: int = 1) -> NodeInfo:
    return NodeInfo(name, "10.0.0.1", 2000, arrived_for, SETTINGS)


def world(number: int, *members: str) -> Round:
    return Round(number, "run", members, SETTINGS, "10.0.0.1", 2000, JOB_LEASE)


@pytest.fixture
def store() -> Store:
    return Store()


def test_the_first_to_arrive_leads(store: Store) -> None:
    first, second = store.arrive("a", 1), store.arrive("b", 2)
    leader = Leader("b", SETTINGS)
    assert isinstance(first.results[1], TxnResult)
    assert first.results[1].succeeded
    assert isinstance(second.results[1], TxnResult)
    known = requests.leader_after(leader, second.results[1])
    assert known is not None
    assert known[0].node_id == "a"
    assert known[1] == store.control.leader_revision
    assert store.here() == {"a", "b"}


def test_an_arrival_behind_another_record_is_refused_with_what_is_there(store: Store) -> None:
    store.arrive("a", 1)
    record = store.form("a")
    refused = store.do(requests.arrive(store.keys, info("b", 1), 2, 0))
    assert not refused.succeeded
    (got,) = refused.results
    assert isinstance(got, GetResult)
    assert control_from(store.keys, got).round == record
    assert store.here() == {"a"}


def test_the_lead_goes_with_its_session_and_can_be_claimed_or_given_up(store: Store) -> None:
    store.arrive("a", 1)
    claim = requests.claim(store.keys, Leader("b", SETTINGS), 2)
    assert not store.do(claim).succeeded
    store.model.step(Revoke(1))
    assert store.do(claim).succeeded
    leads = store.control
    earlier = replace(leads, leader_revision=leads.leader_revision - 1)
    assert not store.do(requests.resign(store.keys, earlier)).succeeded
    # after a loss of data another lead may have the same revision
    another = replace(leads, leader=Leader("c", SETTINGS))
    assert not store.do(requests.resign(store.keys, another)).succeeded
    assert store.do(requests.resign(store.keys, leads)).succeeded
    assert store.control.leader is None


def test_a_round_is_closed_and_lives_on_the_job_lease(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    record = store.form("a", "b")
    assert store.control.round == record
    assert store.control.epoch == store.model.revision
    store.model.step(Revoke(JOB_LEASE))
    assert store.control.round is None
    assert store.here() == {"a", "b"}


def large_world(store: Store, edition: str, *members: str) -> Round:
    """Publish the slices of a world of these members; its record is yet to come."""
    record = world(store.control.next_number)
    slices = Slices(len(members), 2, edition)
    record = replace(record, members=(), slices=slices)
    for txn in requests.publish_slices(
        store.keys, store.control, record, slices, cut(members, slices)
    ):
        assert store.do(txn).succeeded
    return record


def close(store: Store, record: Round) -> TxnResult:
    return store.do(
        requests.close_round(store.keys, store.control, store.nodes_revision, record, {})
    )


def test_a_member_that_has_put_its_presence_back_is_not_declared_lost(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    record = store.form("a", "b")
    lost = Change(record.run, 1, (), {"b": Loss.EXPIRED.value})
    seen = store.control
    assert not store.do(requests.publish_change(store.keys, seen, lost)).succeeded
    left = Change(record.run, 1, (), {"b": Loss.LEFT.value})  # it has said so
    assert store.do(requests.publish_change(store.keys, seen, left)).succeeded
    store.model.step(Revoke(2))
    assert store.do(requests.publish_change(store.keys, store.control, lost)).succeeded


def test_each_member_of_a_large_world_finds_its_rank_in_one_slice(store: Store) -> None:
    members = tuple(f"n{index}" for index in range(20))
    for node_id in members:
        store.arrive(node_id, 1)
    record = large_world(store, "e", *members)
    assert close(store, record).succeeded
    assert record.slices is not None
    for rank, node_id in enumerate(members):
        got = store.read(requests.read_slice(store.keys, record, record.slices, node_id))
        found = slice_from(record, node_id, got)
        assert found is not None
        assert found.ranks[node_id] == rank
    got = store.read(requests.read_slices(store.keys, 1, record.slices))
    every, problems = slices_from(got, 20)
    assert problems == []
    assert assemble(every, 20) == (members, True)


def test_a_large_world_of_which_a_slice_is_lost_is_not_published(store: Store) -> None:
    """Etcd may have gone back since they were put, one after the other."""
    store.arrive("a", 1)
    record = large_world(store, "e", "a", "b")
    assert record.slices is not None
    last = store.keys.slice(record.number, "e", record.slices.count - 1)
    store.do(Txn((), (Delete(last),)))
    assert not close(store, record).succeeded
    assert close(store, large_world(store, "e", "a", "b")).succeeded


def test_slices_that_no_leader_may_publish_any_more_are_refused(store: Store) -> None:
    store.arrive("a", 1)
    record = replace(world(1), members=(), slices=Slices(1, 1, "e"))
    assert record.slices is not None
    late = replace(store.control, leader_revision=store.control.leader_revision - 1)
    (txn,) = requests.publish_slices(store.keys, late, record, record.slices, [{"a": 0}])
    assert not store.do(txn).succeeded


def test_slices_of_failed_attempts_and_of_old_rounds_are_swept_away(store: Store) -> None:
    store.arrive("a", 1)
    for edition in ("d", "f"):
        large_world(store, edition, "a", "b")
    for number in (1, 2, 3):
        assert close(store, large_world(store, "e", "a", "b")).succeeded
        rounds = {key.split(b"/")[-3:-1][0] for key in store.all_keys() if key in store.keys.ranks}
        assert rounds == {b"%010d" % n for n in (number - 1, number) if n}
        editions = {key.split(b"/")[-2] for key in store.all_keys() if key in store.keys.ranks}
        assert editions == {b"e"}


def test_many_and_large_slices_take_several_transactions(store: Store) -> None:
    store.arrive("a", 1)
    record = replace(world(1), slices=Slices(1, 1, "e"))
    assert record.slices is not None
    parts = [{f"n{index}": 0} for index in range(250)]
    txns = requests.publish_slices(store.keys, store.control, record, record.slices, parts)
    assert [len(txn.success) for txn in txns] == [100, 100, 50]
    bulky = [{f"{index}-{n}-" + 400 * "x": n for n in range(250)} for index in range(10)]
    txns = requests.publish_slices(store.keys, store.control, record, record.slices, bulky)
    assert [len(txn.success) for txn in txns] == [5, 5]


@pytest.mark.parametrize(
    "spoil", [Delete, lambda key: Put(key, b"?", 3), lambda key: Put(key, b'{"v":1,"ranks":{}}')]
)
def test_a_member_puts_back_its_slice_only_if_it_is_not_there(
    store: Store, spoil: Callable[[bytes], Op]
) -> None:
    store.arrive("a", 1)
    record = large_world(store, "e", "a", "b")
    assert close(store, record).succeeded
    assert record.slices is not None
    mine = Slice(record.run, 1, record.slices.index_of("a"), {"a": 0, "b": 1})
    before = store.all_keys()
    there = store.read(requests.read_slices(store.keys, 1, record.slices)).kvs
    there_since = store.read(requests.read_presence(store.keys, "a")).kvs[0].mod_revision
    back = requests.restore_presence(
        store.keys, store.control, info("a"), 1, mine, presence_revision=there_since
    )
    assert store.do(back).succeeded
    assert store.read(requests.read_slices(store.keys, 1, record.slices)).kvs == there
    for kv in there:
        store.do(Txn((), (spoil(kv.key),)))
    there_since = store.read(requests.read_presence(store.keys, "a")).kvs[0].mod_revision
    back = requests.restore_presence(
        store.keys, store.control, info("a"), 1, mine, presence_revision=there_since
    )
    assert store.do(back).succeeded
    got = store.read(requests.read_slice(store.keys, record, record.slices, "a"))
    assert slice_from(record, "a", got) == mine
    assert store.all_keys() <= before


def test_an_arrival_after_the_look_refuses_the_close(store: Store) -> None:
    store.arrive("a", 1)
    seen = store.nodes_revision
    store.arrive("b", 2)
    close = requests.close_round(store.keys, store.control, seen, world(1, "a"), {})
    assert not store.do(close).succeeded
    assert store.control.round is None


def test_a_node_that_arrives_again_after_the_look_refuses_the_close(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    seen = store.nodes_revision
    store.arrive("b", 2)
    close = requests.close_round(store.keys, store.control, seen, world(1, "a", "b"), {})
    assert not store.do(close).succeeded


def test_a_node_lost_after_the_look_does_not_refuse_the_close(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    seen = store.nodes_revision
    store.model.step(Revoke(2))
    close = requests.close_round(store.keys, store.control, seen, world(1, "a", "b"), {})
    assert store.do(close).succeeded


def test_a_leader_that_was_replaced_can_neither_close_nor_publish(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    store.form("a", "b")
    old = store.control
    store.model.step(Revoke(1))
    store.do(requests.claim(store.keys, Leader("b", SETTINGS), 2))
    change = Change("run", 1, ("b",))
    seen = store.nodes_revision
    assert not store.do(requests.publish_change(store.keys, old, change)).succeeded
    assert not store.do(requests.close_round(store.keys, old, seen, world(2, "a"), {})).succeeded


def test_a_change_is_published_once(store: Store) -> None:
    store.arrive("a", 1)
    store.form("a")
    before = store.control
    change = Change("run", 1, ("b",), {"a": "left"})
    assert store.do(requests.publish_change(store.keys, before, change)).succeeded
    assert store.control.open_change == change
    assert not store.do(requests.publish_change(store.keys, before, change)).succeeded


def test_old_stores_and_barriers_are_swept_and_the_last_ones_kept(store: Store) -> None:
    store.arrive("a", 1)
    keys = store.keys
    for number in range(1, 5):
        store.form("a")
        stored = keys.store(number, "run").start + b"k/x"
        for key in (stored, keys.barrier(number, "b").start + b"done"):
            store.do(Txn((), (Put(key, b"", JOB_LEASE),)))
    left = store.all_keys()
    assert keys.store(3, "run").start + b"k/x" in left
    assert keys.store(4, "run").start + b"k/x" in left
    assert keys.barrier(3, "b").start + b"done" in left
    assert keys.store(2, "run").start + b"k/x" not in left
    assert keys.barrier(2, "b").start + b"done" not in left


def forget(store: Store, kept: int) -> int:
    """Forget as the leader does after a round; returns how many rounds are remembered then."""
    forget = requests.forget_history(store.read(requests.read_history(store.keys, kept)), kept)
    if forget is not None:
        store.do(forget)
    return store.read(Get(store.keys.audits.start, store.keys.audits.end)).count


def test_the_rounds_that_are_remembered_are_the_last_ones_whatever_their_run(store: Store) -> None:
    """The next run of a job counts its rounds from 1 again."""
    store.arrive("a", 1)
    old = [store.keys.audit(number, "before") for number in range(1, 4)]
    for key in old:
        store.do(Txn((), (Put(key, b"{}"),)))
    formed = [store.form("a").number for _ in range(3)]
    assert forget(store, 4) == 4
    kept = [store.keys.audit(number, "run") for number in formed]
    assert store.all_keys() & {*old, *kept} == {old[-1], *kept}
    assert forget(store, 4) == 4
    assert forget(store, 0) == 0


def test_a_long_memory_is_shortened_in_steps(store: Store) -> None:
    keys = [store.keys.audit(number, "run") for number in range(250)]
    for key in keys:
        store.do(Txn((), (Put(key, b"{}"),)))
    assert [forget(store, 10) for _ in range(4)] == [150, 50, 10, 10]
    assert store.all_keys() == set(keys[-10:])


@pytest.mark.parametrize("lease", ["new", "known", "none"])
def test_an_audit_lives_as_long_as_what_remembers_the_job_s_epochs(
    store: Store, lease: str
) -> None:
    """And where nothing does, as with an embedded etcd, as long as the job."""
    store.arrive("a", 1)
    if lease == "known":
        store.do(Txn((), (Put(store.keys.epoch, values.encode_epoch(1), 3),)))
    record = world(1, "a")
    close = requests.close_round(
        store.keys,
        store.control,
        store.nodes_revision,
        record,
        {"round": 1},
        epoch_lease=2 if lease == "new" else 0,
    )
    closed = store.do(close)
    assert requests.remembered(closed) == 1
    (audit,) = store.read(Get(store.keys.audit(1, "run"))).kvs
    assert audit.lease_id == {"new": 2, "known": 3, "none": JOB_LEASE}[lease]


def test_a_round_of_which_nothing_is_remembered_has_no_audit(store: Store) -> None:
    store.arrive("a", 1)
    closed = store.do(
        requests.close_round(store.keys, store.control, store.nodes_revision, world(1, "a"), None)
    )
    assert closed.succeeded
    assert requests.remembered(closed) == 0
    assert not [key for key in store.all_keys() if key in store.keys.audits]


def test_an_audit_is_bounded_in_bytes(store: Store) -> None:
    """What is longest is left out of it; why the round was closed stays."""
    store.arrive("a", 1)
    names = {f"{number:0100}": "\U0001f4a5" * 200 for number in range(32)}
    audit = {
        "round": 1,
        "because": "all are here",
        "waited_s": [[name, 1.0] for name in names],
        "expelled": list(names),
        "change": {"lost": names},
        "came_back": names,
    }
    record, control = world(1, "a"), store.control
    store.do(requests.close_round(store.keys, control, store.nodes_revision, record, audit))
    (kv,) = store.read(Get(store.keys.audit(1, "run"))).kvs
    assert len(kv.value) <= requests.AUDIT_BYTES
    assert json.loads(kv.value) == {"v": 1, "round": 1, "because": "all are here"}


def test_a_presence_is_put_back_while_the_round_goes_on(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    store.form("a", "b")
    before = store.control
    store.model.step(Revoke(1))
    restore = requests.restore_presence(store.keys, before, info("a"), 3)
    assert store.do(restore).succeeded
    assert not store.do(restore).succeeded  # a copy that comes late
    assert store.here() == {"a", "b"}
    assert store.control.leader == Leader("a", SETTINGS)
    store.do(requests.publish_change(store.keys, store.control, Change("run", 1, ("x",))))
    store.do(Txn((), (Delete(store.keys.node("a")),)))
    assert not store.do(restore).succeeded


def test_the_record_is_put_back_by_the_first_member_only(store: Store) -> None:
    store.arrive("a", 1)
    record = store.form("a", "b")
    epoch = store.control.epoch
    store.model = store.model.emptied()
    for lease in (1, 2, JOB_LEASE):
        store.model.step(Grant(60, lease))
    restored = replace(record, epoch_fixed=epoch)
    before = store.control
    first = requests.restore_record(store.keys, before, restored, info("a"), 1)
    second = requests.restore_record(store.keys, before, restored, info("b"), 2)
    assert store.do(first).succeeded
    assert not store.do(second).succeeded
    assert store.control.round == restored
    assert store.control.epoch == epoch
    assert store.here() == {"a"}


def test_a_record_is_not_put_back_after_a_run_was_closed(store: Store) -> None:
    store.arrive("a", 1)
    record = store.form("a", "b")
    restored = replace(record, epoch_fixed=store.control.epoch)
    store.model.step(Revoke(JOB_LEASE))
    before = store.control
    late = requests.restore_record(store.keys, before, restored, info("a"), 1)
    store.do(Txn((), (Put(store.keys.ended, values.encode_ended(()), 2),)))
    assert not store.do(late).succeeded


def close_job(store: Store, record: Round, lease: int) -> Txn:
    assert record.closure is not None
    return requests.close_job(
        store.keys,
        store.control,
        record,
        (Ended(record.origin, record.closure, store.control.epoch),),
        marker_lease=lease,
        ended_lease=lease,
    )


def test_good_bye_marks_a_presence_only_on_its_own_session(store: Store) -> None:
    store.arrive("a", 1)
    leaving = replace(info("a"), leaving="SIGTERM")
    assert not store.do(requests.say_goodbye(store.keys, leaving, 2)).succeeded
    assert store.do(requests.say_goodbye(store.keys, leaving, 1)).succeeded
    store.do(Txn((), (Delete(store.keys.node("a")),)))
    assert not store.do(requests.say_goodbye(store.keys, leaving, 1)).succeeded
    assert store.here() == set()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_leaders_good_bye_ends_its_world_or_finds_it_ended(store: Store, is_over: bool) -> None:
    """It may not have heard yet that the world is over; the others are told why it goes, anyway."""
    store.arrive("a", 1)
    store.form("a")
    change = Change("run", 1, (), {"a": "left: SIGTERM"})
    also = (requests.publish_change(store.keys, store.control, change),)
    if is_over:
        earlier = Change("run", 1, ("x",))
        store.do(requests.publish_change(store.keys, store.control, earlier))
    leaving = replace(info("a"), leaving="SIGTERM")
    assert store.do(requests.say_goodbye(store.keys, leaving, 1, also)).succeeded
    assert store.control.open_change == (earlier if is_over else change)
    found = store.read(requests.read_nodes(store.keys))
    assert nodes_from(store.keys, found, 0.0).present["a"].info.leaving == "SIGTERM"


def test_a_job_is_closed_once_and_the_marker_lives_on_its_own_lease(store: Store) -> None:
    store.arrive("a", 1)
    record = store.form("a")
    closed = replace(record, closure=Closure("a", "done", True, 0.0))
    store.model.step(Grant(60, 99))
    close = close_job(store, closed, 99)
    assert store.do(close).succeeded
    assert not store.do(close).succeeded
    store.model.step(Revoke(JOB_LEASE))
    assert store.control.closure == closed.closure
    assert store.control.end_of(record.run) == closed.closure
    store.model.step(Revoke(99))
    assert store.control.round is None


@pytest.mark.parametrize("closed", [False, True])
def test_only_the_last_one_removes_the_job(store: Store, closed: bool) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    record = store.form("a", "b")
    store.do(Txn((), (Put(store.keys.store(1, "run").start + b"k/x", b"=1", JOB_LEASE),)))
    if closed:
        marker = replace(record, closure=Closure("a", "done", True, 0.0))
        store.do(close_job(store, marker, 3))
    removal = requests.remove_job(store.keys, store.control, "a")
    store.model.step(Revoke(1))
    assert not store.do(removal).succeeded
    store.model.step(Revoke(2))
    assert store.do(removal).succeeded
    audit = store.keys.audit(record.number, record.run)
    markers = {store.keys.round, store.keys.ended} if closed else set()
    assert store.all_keys() == markers | {audit}


def test_the_light_stays_on_if_the_record_is_another(store: Store) -> None:
    before = store.control
    store.arrive("a", 1)
    store.form("a")
    store.model.step(Revoke(1))
    assert not store.do(requests.remove_job(store.keys, before, "a")).succeeded
    assert store.control.round is not None


def test_views_built_from_a_read_and_from_the_watch_are_the_same() -> None:
    async def scenario() -> None:
        async with MemoryEtcd() as server:
            etcd = server.connect()
            keys = JobKeys("/p", "job")
            session = (await etcd.grant(60)).lease_id
            job = (await etcd.grant(60, lease_id=JOB_LEASE)).lease_id
            control = control_from(keys, await etcd.get(requests.read_control(keys)))
            nodes = nodes_from(keys, await etcd.get(requests.read_nodes(keys)), 0.0)
            watch = etcd.watch(keys.below.start, keys.below.end, start_revision=server.revision + 1)
            await etcd.txn(requests.arrive(keys, info("a"), session, 0))
            await etcd.txn(requests.arrive(keys, info("b"), session, 0))
            now = control_from(keys, await etcd.get(requests.read_control(keys)))
            await etcd.txn(requests.close_round(keys, now, server.revision, world(1, "a"), {}))
            leaving = replace(info("b"), leaving="SIGTERM")
            await etcd.txn(requests.say_goodbye(keys, leaving, session))
            await etcd.txn(Txn((), (Delete(keys.node("b")),)))
            last = server.revision
            batches = []
            async for batch in watch:
                batches.append(batch)
                if batch.revision >= last:
                    break
            for batch in (*batches, *batches):  # told twice: nothing changes
                events = [event for event in batch.events if event.kv.key in keys.control]
                control = control_after(keys, control, batch.revision, events)
                events = [event for event in batch.events if event.kv.key in keys.nodes]
                nodes = nodes_after(keys, nodes, batch.revision, events, 0.0)
            fresh = await etcd.get(requests.read_control(keys))
            assert control == control_from(keys, fresh)
            read = nodes_from(keys, await etcd.get(requests.read_nodes(keys)), 0.0)
            assert nodes.present == read.present
            assert nodes.left == {"b": "SIGTERM"}
            assert job == JOB_LEASE
            await watch.close()

    asyncio.run(scenario())


def test_a_fresh_read_makes_nobodys_wait_begin_again(store: Store) -> None:
    store.arrive("a", 1)
    first = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 10.0)
    store.arrive("b", 2)
    second = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 20.0, first)
    assert {name: presence.seen_s for name, presence in second.present.items()} == {
        "a": 10.0,
        "b": 20.0,
    }
    store.arrive("a", 1)
    third = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 30.0, second)
    assert third.present["a"].seen_s == 30.0


def test_a_view_tells_since_when_a_node_has_been_absent(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    nodes = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 10.0)
    assert nodes.absent_since_s("never seen") == 10.0

    def after(kind: EventKind, name: str, now_s: float) -> Nodes:
        kv = next(iter(store.read(requests.read_nodes(store.keys)).kvs))
        kv = replace(kv, key=store.keys.node(name), mod_revision=nodes.revision + 1)
        return nodes_after(store.keys, nodes, kv.mod_revision, [Event(kind, kv)], now_s)

    nodes = after(EventKind.DELETE, "a", 20.0)
    assert nodes.absent_since_s("a") == 20.0
    # A fresh read changes nothing, and notices who went while nobody watched.
    empty = replace(store.read(requests.read_nodes(store.keys)), kvs=(), revision=nodes.revision)
    nodes = nodes_from(store.keys, empty, 21.0, nodes)
    assert [nodes.absent_since_s(name) for name in "abc"] == [20.0, 21.0, 10.0]
    nodes = after(EventKind.DELETE, "c", 60.0)
    assert dict(nodes.gone) == {"c": 60.0}  # the others went long ago


def test_guards_look_at_the_record_as_it_was_read(store: Store) -> None:
    txn = requests.arrive(store.keys, info("a"), 1, 42)
    assert txn.guards == (Compare(store.keys.round, Target.MOD, Relation.EQUAL, 42),)


# --- accusations ----------------------------------------------------------------------------------

ACCUSATION = Accusation("b~1~x", "its process exited", is_certain=True)


def _presence(store: Store, node_id: str) -> KeyValue:
    (kv,) = store.read(requests.read_presence(store.keys, node_id)).kvs
    return kv


def test_an_accusation_takes_the_place_of_the_presence_and_frees_the_lead(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    assert store.control.leader is not None
    seen = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 10.0)
    accused = requests.accuse(store.keys, "a", _presence(store, "a"), ACCUSATION, 2)
    result = store.do(accused)
    assert result.succeeded
    assert store.control.leader is None
    nodes = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 20.0, seen)
    assert set(nodes.present) == {"b"}
    assert nodes.accused == {"a": Accused(ACCUSATION, result.revision, 20.0)}
    assert nodes.how_absent("a") == ACCUSATION.how
    again = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 30.0, nodes)
    assert again.accused["a"].seen_s == 20.0
    assert not store.do(accused).succeeded  # the presence is not that any more
    store.model.step(Revoke(2))
    assert not store.read(requests.read_nodes(store.keys)).kvs


def test_a_presence_that_was_put_again_is_not_accused_for_the_one_before(store: Store) -> None:
    store.arrive("a", 1)
    before = _presence(store, "a")
    store.arrive("a", 1)
    assert not store.do(requests.accuse(store.keys, "a", before, ACCUSATION, 2)).succeeded


def test_the_lead_of_another_node_stays(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    accused = requests.accuse(store.keys, "b", _presence(store, "b"), ACCUSATION, 1)
    assert store.do(accused).succeeded
    assert store.control.leader is not None
    assert store.control.leader.node_id == "a"


def test_who_has_answered_an_accusation_is_not_declared_lost(store: Store) -> None:
    for node, lease in (("a", 1), ("b", 2)):
        store.arrive(node, lease)
    record = store.form("a", "b")
    store.do(requests.accuse(store.keys, "b", _presence(store, "b"), ACCUSATION, 1))
    nodes = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 10.0)
    change = Change(record.run, 1, (), {"b": ACCUSATION.how})
    published = requests.publish_change(store.keys, store.control, change, nodes)
    answered = requests.restore_presence(
        store.keys,
        store.control,
        info("b"),
        2,
        presence_revision=nodes.in_place_of("b"),
    )
    assert store.do(answered).succeeded
    assert not store.do(published).succeeded
    store.do(requests.accuse(store.keys, "b", _presence(store, "b"), ACCUSATION, 1))
    nodes = nodes_from(store.keys, store.read(requests.read_nodes(store.keys)), 10.0)
    assert store.do(requests.publish_change(store.keys, store.control, change, nodes)).succeeded
    assert not store.do(answered).succeeded


def test_an_accusation_is_withdrawn_by_who_made_it_and_only_that_one(store: Store) -> None:
    store.arrive("a", 1)
    accused = store.do(requests.accuse(store.keys, "a", _presence(store, "a"), ACCUSATION, 2))
    assert not store.do(
        requests.withdraw_accusation(store.keys, "a", accused.revision - 1)
    ).succeeded
    assert store.do(requests.withdraw_accusation(store.keys, "a", accused.revision)).succeeded
    assert not store.read(requests.read_nodes(store.keys)).kvs
