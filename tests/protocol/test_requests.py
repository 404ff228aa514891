"""Every transaction of the protocol on the in-memory etcd: when it succeeds, and what it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from rdzv_etcd.etcd.port import GetResult, TxnResult
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.model import Accused, Change, Control, Leader
from rdzv_etcd.protocol.views import control_from
from rdzv_etcd.world_change import LEASE_EXPIRED, LEFT
from tests.protocol.store import ACCUSATION, JOB_LEASE, SETTINGS, Store, info, world

# --- arriving, and the lead -----------------------------------------------------------------------


def test_the_first_to_arrive_leads(store: Store) -> None:
    first, second = store.arrive("a", 1).results[1], store.arrive("b", 2).results[1]
    assert isinstance(first, TxnResult)
    assert isinstance(second, TxnResult)
    assert first.succeeded
    known = requests.leader_after(Leader("b", SETTINGS), second)
    assert known == (Leader("a", SETTINGS), store.control.leader_revision)
    assert requests.leader_after(Leader("b", SETTINGS), second, known[1]) is None  # no news
    assert store.here() == {"a", "b"}


def test_an_arrival_behind_another_record_is_refused_with_the_control_keys(store: Store) -> None:
    record = store.formed("a")
    refused = store.do(requests.arrive(store.keys, info("b", 1), 2, Control(1)))
    assert not refused.succeeded
    (got,) = refused.results
    assert isinstance(got, GetResult)
    assert control_from(store.keys, got).round == record
    assert store.here() == {"a"}


def test_the_lead_goes_with_its_session_and_can_be_claimed_or_given_up(store: Store) -> None:
    store.arrive("a", 1)
    claim = requests.claim(store.keys, Leader("b", SETTINGS), 2)
    assert not store.does(claim)
    store.revoke(1)
    assert store.does(claim)
    leads = store.control
    for other in (
        replace(leads, leader_revision=leads.leader_revision - 1),
        # after a loss of data another lead may have the same revision
        replace(leads, leader=Leader("c", SETTINGS)),
    ):
        assert not store.does(requests.resign(store.keys, other))
    assert store.does(requests.resign(store.keys, leads))
    assert store.control.leader is None


# --- closing a round ------------------------------------------------------------------------------


def test_a_round_is_closed_and_lives_on_the_job_lease(store: Store) -> None:
    record = store.formed("a", "b")
    assert store.control.round == record
    assert store.control.epoch == store.model.revision
    store.revoke(JOB_LEASE)
    assert store.control.round is None
    assert store.here() == {"a", "b"}


@pytest.mark.parametrize(
    ("meanwhile", "is_closed"),
    [
        (lambda store: store.arrive("c", 3), False),
        (lambda store: store.arrive("b", 2), False),  # it arrives again
        (lambda store: store.revoke(2), True),  # it is lost: a change will follow
    ],
)
def test_a_round_is_closed_unless_a_node_has_arrived_since_the_look(
    store: Store, meanwhile: Callable[[Store], object], is_closed: bool
) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    seen = store.nodes().revision
    meanwhile(store)
    assert store.close(world(1, "a", "b"), seen=seen).succeeded is is_closed
    assert (store.control.round is not None) is is_closed


def test_old_stores_and_barriers_are_swept_and_the_last_ones_kept(store: Store) -> None:
    store.arrive("a", 1)
    stored, waited = [], []
    for number in range(1, 5):
        store.form("a")
        stored.append(store.keys.store(number, "run").start + b"k/x")
        waited.append(store.keys.barrier(number, "b").start + b"done")
        store.put(stored[-1], waited[-1], lease=JOB_LEASE)
    assert store.all_keys() & {*stored, *waited} == {*stored[2:], *waited[2:]}


# --- the audits of rounds -------------------------------------------------------------------------


def forget(store: Store, kept: int) -> int:
    """Forget as the leader does after a round; return how many rounds are remembered then."""
    txn = requests.forget_history(store.read(requests.read_history(store.keys, kept)), kept)
    if txn is not None:
        store.do(txn)
    return len(store.all_keys(store.keys.audits))


def test_the_rounds_that_are_remembered_are_the_last_ones_whatever_their_run(store: Store) -> None:
    """The next run of a job counts its rounds from 1 again."""
    store.arrive("a", 1)
    old = [store.keys.audit(number, "before") for number in range(1, 4)]
    for key in old:
        store.put(key)
    kept = [store.keys.audit(store.form("a").number, "run") for _ in range(3)]
    assert forget(store, 4) == 4
    assert store.all_keys(store.keys.audits) == {old[-1], *kept}
    assert forget(store, 4) == 4
    assert forget(store, 0) == 0


def test_a_long_memory_is_shortened_in_steps(store: Store) -> None:
    keys = [store.keys.audit(number, "run") for number in range(250)]
    for key in keys:
        store.put(key)
    assert [forget(store, 10) for _ in range(4)] == [150, 50, 10, 10]
    assert store.all_keys() == set(keys[-10:])


@pytest.mark.parametrize(
    ("known", "epoch_lease", "lease"), [(False, 2, 2), (True, 0, 3), (False, 0, JOB_LEASE)]
)
def test_an_audit_is_on_the_lease_of_the_epochs_or_with_an_embedded_etcd_on_the_job_s(
    store: Store, known: bool, epoch_lease: int, lease: int
) -> None:
    store.arrive("a", 1)
    if known:
        store.put(store.keys.epoch, value=values.encode_epoch(1), lease=3)
    closed = store.close(world(1, "a"), audit={"round": 1}, epoch_lease=epoch_lease)
    assert requests.remembered(closed) == 1
    (audit,) = store.read(store.keys.audits.read()).kvs
    assert (audit.key, audit.lease_id) == (store.keys.audit(1, "run"), lease)


def test_a_round_that_is_not_to_be_remembered_has_no_audit(store: Store) -> None:
    store.arrive("a", 1)
    closed = store.close(world(1, "a"))
    assert closed.succeeded
    assert requests.remembered(closed) == 0
    assert not store.all_keys(store.keys.audits)


def test_an_audit_is_bounded_in_bytes(store: Store) -> None:
    """The longest lists are left out of it; why the round was closed stays."""
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
    store.close(world(1, "a"), audit=audit)
    (kv,) = store.read(store.keys.audits.read()).kvs
    assert len(kv.value) <= requests.AUDIT_BYTES
    assert json.loads(kv.value) == {"v": 1, "round": 1, "because": "all are here"}


# --- changes, losses and returns ------------------------------------------------------------------


def test_a_change_is_published_once(store: Store) -> None:
    store.formed("a")
    before = store.control
    change = Change("run", 1, ("b",), {"a": "left"})
    assert store.publish(change, before)
    assert store.control.open_change == change
    assert not store.publish(change, before)


def test_a_member_that_has_put_its_presence_back_is_not_declared_lost(store: Store) -> None:
    store.formed("a", "b")
    lost = Change("run", 1, (), {"b": LEASE_EXPIRED})
    assert not store.publish(lost)
    assert store.publish(Change("run", 1, (), {"b": LEFT}))  # it has announced that
    store.revoke(2)
    assert store.publish(lost)


def test_a_presence_is_put_back_while_the_round_continues(store: Store) -> None:
    store.formed("a", "b")
    before = store.control
    store.revoke(1)
    restore = requests.restore_presence(store.keys, before, info("a"), 3)
    assert store.does(restore)
    assert not store.does(restore)  # a copy that comes late
    assert store.here() == {"a", "b"}
    assert store.control.leader == Leader("a", SETTINGS)
    store.publish(Change("run", 1, ("x",)))
    store.delete(store.keys.node("a"))
    assert not store.does(restore)


def test_the_record_is_put_back_by_the_first_member_only(store: Store) -> None:
    store.arrive("a", 1)
    record, epoch = store.form("a", "b"), store.control.epoch
    store.model = store.model.emptied()
    store.grant(1, 2, JOB_LEASE)
    restored = replace(record, epoch_fixed=epoch)
    before = store.control
    first, second = (
        requests.restore_record(store.keys, before, restored, info(name), session)
        for name, session in (("a", 1), ("b", 2))
    )
    assert store.does(first)
    assert not store.does(second)
    assert (store.control.round, store.control.epoch) == (restored, epoch)
    assert store.here() == {"a"}


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_over", [False, True])
def test_a_leader_s_goodbye_ends_its_world_or_finds_it_ended(store: Store, is_over: bool) -> None:
    """It may not know yet that the world is over; the others learn why it goes, anyway."""
    store.formed("a")
    earlier, change = Change("run", 1, ("x",)), Change("run", 1, (), {"a": "left: SIGTERM"})
    also = requests.publish_change(store.keys, store.control, change)
    if is_over:
        store.publish(earlier)
    leaving = replace(info("a"), leaving="SIGTERM")
    assert store.does(requests.say_goodbye(store.keys, leaving, 1, also))
    assert store.control.open_change == (earlier if is_over else change)
    assert store.nodes().present["a"].info.leaving == "SIGTERM"


def test_a_job_is_closed_once_and_the_marker_lives_on_its_own_lease(store: Store) -> None:
    record = store.formed("a")
    store.grant(99)
    close = store.close_job(record, 99)
    assert store.does(close)
    assert not store.does(close)
    store.revoke(JOB_LEASE)
    closure = store.control.closure
    assert closure is not None
    assert store.control.end_of(record.run) == closure
    store.revoke(99)
    assert store.control.round is None


@pytest.mark.parametrize("closed", [False, True])
def test_only_the_last_node_removes_the_job(store: Store, closed: bool) -> None:
    record = store.formed("a", "b")
    store.put(store.keys.store(1, "run").start + b"k/x", value=b"=1", lease=JOB_LEASE)
    if closed:
        store.do(store.close_job(record, 3))
    removal = requests.remove_job(store.keys, store.control, "a")
    store.revoke(1)
    assert not store.does(removal)
    store.revoke(2)
    assert store.does(removal)
    markers = {store.keys.round, store.keys.ended} if closed else set()
    assert store.all_keys() == markers | {store.keys.audit(record.number, record.run)}


# --- accusations ----------------------------------------------------------------------------------


def test_an_accusation_takes_the_place_of_the_presence_and_frees_the_lead(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    assert store.control.leader is not None
    seen, presence = store.nodes(10.0), store.presence("a")
    result = store.accuse("a", 2)
    assert result.succeeded
    assert store.control.leader is None
    nodes = store.nodes(20.0, seen)
    assert set(nodes.present) == {"b"}
    assert nodes.accused == {"a": Accused(ACCUSATION, result.revision, 20.0)}
    assert nodes.how_absent("a") == ACCUSATION.how
    assert store.nodes(30.0, nodes).accused["a"].seen_s == 20.0
    assert not store.accuse("a", 2, presence).succeeded  # the presence is not that any more
    store.revoke(2)
    assert not store.all_keys(store.keys.nodes)


def test_a_presence_that_was_put_again_is_not_accused_for_the_one_before(store: Store) -> None:
    store.arrive("a", 1)
    before = store.presence("a")
    store.arrive("a", 1)
    assert not store.accuse("a", 2, before).succeeded


def test_the_lead_of_another_node_stays(store: Store) -> None:
    store.arrive("a", 1)
    store.arrive("b", 2)
    assert store.accuse("b", 1).succeeded
    assert store.control.leader == Leader("a", SETTINGS)


def test_a_node_that_has_answered_an_accusation_is_not_declared_lost(store: Store) -> None:
    store.formed("a", "b")
    store.accuse("b", 1)
    nodes, control = store.nodes(10.0), store.control
    change = Change("run", 1, (), {"b": ACCUSATION.how})
    answer = requests.restore_presence(
        store.keys, control, info("b"), 2, presence_revision=nodes.in_place_of("b")
    )
    assert store.does(answer)
    assert not store.publish(change, control, nodes)
    store.accuse("b", 1)
    assert store.publish(change, nodes=store.nodes(10.0))
    assert not store.does(answer)
