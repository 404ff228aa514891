"""A user whose role lacks a permission: what is refused, and what still works."""

from __future__ import annotations

import pytest

from rdzv_etcd.errors import EtcdPermissionError
from rdzv_etcd.etcd.port import Compare, Delete, Etcd, Get, Op, Put, Relation, Target, Txn
from tests.contract.lab import Lab, events_of
from tests.etcd.tools import soon
from tests.support.roles import Lack

pytestmark = pytest.mark.usefixtures("own_server")

HELD = "b"
"""The key that the role lacks, between two that it has."""


def limited(lab: Lab, *, reads: bool = True, writes: bool = True, end: str | None = None) -> Etcd:
    """Return a connection whose role lacks :data:`HELD`, or all from there up to ``end``."""
    range_end = None if end is None else lab.key(end)
    lab.operator.set_lacks(Lack(lab.key(HELD), range_end, reads, writes))
    return lab.connect()


async def allows(etcd: Etcd, request: Get | Txn) -> bool:
    try:
        await (etcd.get(request) if isinstance(request, Get) else etcd.txn(request))
    except EtcdPermissionError:
        return False
    return True


def reading(lab: Lab) -> dict[str, Get | Txn]:
    """Requests that have to read :data:`HELD`."""
    held = lab.key(HELD)
    guard = Compare(held, Target.VERSION, Relation.EQUAL, 0)
    never = Compare(lab.key("a"), Target.VERSION, Relation.EQUAL, 99)
    return {
        "the key": Get(held),
        "a range with it": Get(lab.key("a"), lab.key("c")),
        "its count": Get(held, count_only=True),
        "a guard": Txn((guard,), ()),
        "in a transaction": Txn((), (Get(held),)),
        "in the branch that is not taken": Txn((never,), (Get(held),)),
    }


def writing(lab: Lab) -> dict[str, Get | Txn]:
    """Requests that have to write it."""
    held = lab.key(HELD)
    never = Compare(lab.key("a"), Target.VERSION, Relation.EQUAL, 99)
    ops: dict[str, Op] = {
        "a put": Put(held, b"v"),
        "its deletion": Delete(held),
        "of a range": Delete(lab.key("a"), lab.key("c")),
    }
    alone: dict[str, Get | Txn] = {name: Txn((), (op,)) for name, op in ops.items()}
    return {**alone, "in the branch that is not taken": Txn((never,), (Put(held, b"v"),))}


@pytest.mark.parametrize(("reads", "writes"), [(True, True), (True, False), (False, True)])
async def test_what_needs_a_key_that_the_role_lacks_is_refused(
    lab: Lab, reads: bool, writes: bool
) -> None:
    etcd = limited(lab, reads=reads, writes=writes)
    for name, request in reading(lab).items():
        assert await allows(etcd, request) is not reads, name
    for name, request in writing(lab).items():
        assert await allows(etcd, request) is not writes, name


async def test_neighbours_are_allowed(lab: Lab) -> None:
    etcd = limited(lab, end="d")
    assert await allows(etcd, Get(lab.key("a"), lab.key(HELD)))
    assert not await allows(etcd, Get(lab.key("a"), lab.key(HELD) + b"\x00"))
    assert not await allows(etcd, Get(lab.key("c\xff")))
    assert await allows(etcd, Get(lab.key("d"), lab.end))
    assert not await allows(etcd, Get(lab.key("a"), b"\x00"))


async def test_a_refused_transaction_did_nothing(lab: Lab) -> None:
    etcd = limited(lab)
    with pytest.raises(EtcdPermissionError):
        await etcd.txn(Txn((), (Put(lab.key("a"), b"v"), Put(lab.key(HELD), b"v"))))
    assert not (await etcd.get(Get(lab.key("a")))).kvs


async def test_a_lease_cannot_be_revoked_with_such_a_key_on_it(lab: Lab) -> None:
    """Whether it can be renewed, or something else be put to it, depends on etcd's version."""
    lab.operator.set_lacks()
    etcd = lab.connect()
    lease_id = (await etcd.grant(60)).lease_id
    await etcd.txn(Txn((), (Put(lab.key(HELD), b"v", lease_id),)))
    etcd = limited(lab)
    with pytest.raises(EtcdPermissionError):
        await etcd.revoke(lease_id)
    lab.operator.set_lacks()
    assert await etcd.revoke(lease_id)


async def test_a_new_watch_is_refused_and_an_old_one_continues(lab: Lab) -> None:
    lab.operator.set_lacks()
    etcd = lab.connect()
    revision = (await etcd.get(Get(lab.root, lab.end))).revision
    old = etcd.watch(lab.root, lab.end, start_revision=revision + 1)
    await soon(old.ready())
    etcd = limited(lab, writes=False)
    with pytest.raises(EtcdPermissionError):
        await soon(etcd.watch(lab.root, lab.end, start_revision=revision + 1).ready())
    await etcd.txn(Txn((), (Put(lab.key(HELD), b"v"),)))
    assert [event.kv.key for event in await events_of(old, 1)] == [lab.key(HELD)]


async def test_what_is_granted_again_is_allowed_again(lab: Lab) -> None:
    etcd = limited(lab)
    assert not await allows(etcd, Get(lab.key(HELD)))
    lab.operator.set_lacks()
    assert await allows(etcd, Get(lab.key(HELD)))
    assert await allows(etcd, Txn((), (Put(lab.key(HELD), b"v"),)))
