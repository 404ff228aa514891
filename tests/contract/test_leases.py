"""Leases, through the port."""

from __future__ import annotations

import asyncio
import random

import pytest

from rdzv_etcd.errors import InvalidRequestError, LeaseExistsError, LeaseNotFoundError
from rdzv_etcd.etcd.port import EventKind, Put, Txn
from tests.contract.lab import Lab, events_of, next_batch

_GONE = 0x7FFF_0000_0002


async def test_the_server_chooses_an_id_and_may_raise_the_ttl(lab: Lab) -> None:
    one, two = await lab.etcd.grant(30), await lab.etcd.grant(1)
    assert one.lease_id > 0
    assert two.lease_id not in (0, one.lease_id)
    assert one.ttl_s == 30
    assert 1 <= two.ttl_s <= 2  # etcd's floor depends on its election timeout


async def test_granting_does_not_raise_the_revision(lab: Lab) -> None:
    before = await lab.put("a")
    grant = await lab.etcd.grant(30)
    assert grant.revision == before
    await lab.etcd.revoke(grant.lease_id)
    assert await lab.revision() == before


async def test_a_lease_can_be_granted_under_a_chosen_id_once(lab: Lab) -> None:
    lease_id = random.SystemRandom().randrange(1 << 40, 1 << 62)
    assert (await lab.etcd.grant(30, lease_id=lease_id)).lease_id == lease_id
    with pytest.raises(LeaseExistsError) as caught:
        await lab.etcd.grant(30, lease_id=lease_id)
    assert caught.value.lease_id == lease_id
    assert await lab.etcd.revoke(lease_id) is True
    assert await lab.etcd.revoke(lease_id) is False
    assert (await lab.etcd.grant(40, lease_id=lease_id)).ttl_s == 40
    assert await lab.etcd.revoke(lease_id)


async def test_an_absurd_ttl_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidRequestError):
        await lab.etcd.grant(9_000_000_001)


async def test_a_put_on_a_missing_lease_is_refused(lab: Lab) -> None:
    with pytest.raises(LeaseNotFoundError) as caught:
        await lab.put("a", lease_id=_GONE)
    assert caught.value.lease_id == _GONE
    with pytest.raises(LeaseNotFoundError):
        await lab.do(Txn((), (Put(lab.key("a"), b"", _GONE),)))


async def test_revoking_deletes_all_keys_of_the_lease_in_one_revision(lab: Lab) -> None:
    grant = await lab.etcd.grant(30)
    for name in ("b", "a", "c"):
        last = await lab.put(name, lease_id=grant.lease_id)
    kept = await lab.put("kept")
    watch = lab.watch(start_revision=kept + 1)
    assert await lab.etcd.revoke(grant.lease_id) is True
    batch = await next_batch(watch)
    assert [event.kv.key for event in batch.events] == [lab.key(name) for name in "abc"]
    assert {event.kind for event in batch.events} == {EventKind.DELETE}
    assert {event.kv.mod_revision for event in batch.events} == {last + 2}
    assert [kv.key for kv in (await lab.all()).kvs] == [lab.key("kept")]


async def test_a_put_moves_a_key_to_its_lease_or_off_it(lab: Lab) -> None:
    one, two = await lab.etcd.grant(30), await lab.etcd.grant(30)
    await lab.put("moved", lease_id=one.lease_id)
    await lab.put("moved", lease_id=two.lease_id)
    await lab.put("freed", lease_id=one.lease_id)
    await lab.put("freed")
    await lab.etcd.revoke(one.lease_id)
    assert [kv.key for kv in (await lab.all()).kvs] == [lab.key("freed"), lab.key("moved")]
    await lab.etcd.revoke(two.lease_id)
    assert [kv.key for kv in (await lab.all()).kvs] == [lab.key("freed")]


async def test_ignoring_the_value_with_a_lease_attaches_it(lab: Lab) -> None:
    grant = await lab.etcd.grant(30)
    await lab.put("a", b"kept")
    await lab.do(Put(lab.key("a"), b"", grant.lease_id, ignore_value=True))
    kv = await lab.read("a")
    assert kv is not None
    assert (kv.value, kv.lease_id) == (b"kept", grant.lease_id)
    await lab.etcd.revoke(grant.lease_id)
    assert await lab.read("a") is None


async def test_a_lease_that_is_not_renewed_expires_with_its_keys(lab: Lab) -> None:
    grant = await lab.etcd.grant(2)
    await lab.put("a", lease_id=grant.lease_id)
    last = await lab.put("b", lease_id=grant.lease_id)
    watch = lab.watch(start_revision=last + 1)
    batch = await next_batch(watch)
    assert [(event.kind, event.kv.key) for event in batch.events] == [
        (EventKind.DELETE, lab.key("a")),
        (EventKind.DELETE, lab.key("b")),
    ]
    assert await lab.etcd.keep_alive(grant.lease_id) == 0
    assert await lab.etcd.revoke(grant.lease_id) is False


async def test_a_lease_that_is_renewed_lives(lab: Lab) -> None:
    grant = await lab.etcd.grant(4)
    await lab.put("a", lease_id=grant.lease_id)
    for _ in range(5):
        await asyncio.sleep(1)
        assert await lab.etcd.keep_alive(grant.lease_id) == 4
    assert await lab.read("a") is not None
    await lab.etcd.revoke(grant.lease_id)


async def test_how_long_a_lease_has_left(lab: Lab) -> None:
    grant = await lab.etcd.grant(60)
    left = await lab.etcd.time_to_live(grant.lease_id)
    assert left is not None
    assert 50 <= left.left_s <= left.granted_s == 60
    assert left.silent_s == 60 - left.left_s
    await lab.etcd.revoke(grant.lease_id)
    assert await lab.etcd.time_to_live(grant.lease_id) is None


async def test_many_leases_are_kept_alive_at_once(lab: Lab) -> None:
    grants = await asyncio.gather(*(lab.etcd.grant(20 + number) for number in range(20)))
    ids = [grant.lease_id for grant in grants]
    ttls = await asyncio.gather(*(lab.etcd.keep_alive(id_) for id_ in [*ids, _GONE, *ids]))
    assert ttls == [*range(20, 40), 0, *range(20, 40)]


@pytest.mark.usefixtures("own_server")
async def test_a_restart_extends_leases_and_sessions_continue(lab: Lab) -> None:
    grant = await lab.etcd.grant(60)
    await lab.put("a", lease_id=grant.lease_id)
    revision = await lab.revision()
    watch = lab.watch(start_revision=revision + 1)
    lab.operator.restart()
    assert await lab.etcd.keep_alive(grant.lease_id) == 60
    await lab.put("b")
    assert [event.kv.key for event in await events_of(watch, 1)] == [lab.key("b")]


@pytest.mark.usefixtures("own_server")
async def test_going_back_to_an_older_snapshot_brings_leases_back_that_had_ended(lab: Lab) -> None:
    """What was granted since is unknown; keys, revisions and leases are what they were."""
    early = await lab.etcd.grant(60)
    await lab.put("early", lease_id=early.lease_id)
    revision = await lab.revision()
    lab.operator.save()
    await lab.etcd.revoke(early.lease_id)
    late = await lab.etcd.grant(60)
    await lab.put("late", lease_id=late.lease_id)
    lab.operator.restore()
    assert await lab.etcd.keep_alive(early.lease_id) == 60
    assert await lab.etcd.keep_alive(late.lease_id) == 0
    found = await lab.all()
    assert [(kv.key, kv.lease_id) for kv in found.kvs] == [(lab.key("early"), early.lease_id)]
    assert found.revision == revision
    assert await lab.put("again") == revision + 1


async def test_a_deleted_key_does_not_end_its_lease(lab: Lab) -> None:
    """As after an operator's ``etcdctl del --prefix``: sessions go on, with nothing on them."""
    grant = await lab.etcd.grant(60)
    await lab.put("a", lease_id=grant.lease_id)
    await lab.delete("a")
    assert await lab.etcd.keep_alive(grant.lease_id) == 60
    await lab.put("a")
    await lab.put("b", lease_id=grant.lease_id)
    await lab.etcd.revoke(grant.lease_id)
    assert [kv.key for kv in (await lab.all()).kvs] == [lab.key("a")]
