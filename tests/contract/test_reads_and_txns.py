"""Reads and transactions, through the port."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rdzv_etcd.errors import InvalidRequestError, LeaseNotFoundError, RequestTooLargeError
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Get,
    GetResult,
    KeyValue,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
    WriteResult,
)
from tests.contract.lab import Lab

EQ, GT, LT = Relation.EQUAL, Relation.GREATER, Relation.LESS


async def test_a_key_carries_its_bookkeeping(lab: Lab) -> None:
    assert await lab.read("a") is None
    first, second = await lab.put("a", b"1"), await lab.put("a", b"2")
    assert second == first + 1
    assert await lab.read("a") == KeyValue(lab.key("a"), b"2", first, second, 2)
    await lab.delete("a")
    created = await lab.put("a", b"again")
    assert await lab.read("a") == KeyValue(lab.key("a"), b"again", created, created, 1)


async def test_binary_keys_and_empty_values_are_kept(lab: Lab) -> None:
    key = lab.root + bytes(range(256))
    await lab.do(Put(key, b""))
    assert (await lab.etcd.get(Get(key))).kvs[0].value == b""
    assert (await lab.all()).kvs[0].key == key


async def test_a_range_is_half_open_and_in_order(lab: Lab) -> None:
    for name in ("c", "a", "b", "ba", "d", "c"):
        await lab.put(name)
    everything = Get(lab.root, lab.end)
    for request, names, count in (
        (Get(lab.key("a"), lab.key("c")), "a b ba", 3),
        (Get(lab.key("c"), lab.key("a")), "", 0),
        (Get(lab.key("e"), lab.end), "", 0),
        (everything, "a b ba c d", 5),
        (replace(everything, limit=2), "a b", 5),
        (replace(everything, keys_only=True), "a b ba c d", 5),
        (replace(everything, count_only=True), "", 5),
        (replace(everything, count_only=True, limit=1), "", 5),
        (replace(everything, newest_first=True), "c d ba b a", 5),
        (replace(everything, newest_first=True, limit=1, keys_only=True), "c", 5),
    ):
        result = await lab.etcd.get(request)
        assert [kv.key for kv in result.kvs] == [lab.key(name) for name in names.split()], request
        assert result.count == count, request
        assert {kv.value for kv in result.kvs} <= {b"" if request.keys_only else b"v"}, request


async def test_a_range_may_reach_to_the_end_of_the_key_space(lab: Lab) -> None:
    await lab.put("a")
    last = b"\xff\xff" + lab.root
    await lab.do(Put(last, b"x"))
    keys = [kv.key for kv in (await lab.etcd.get(Get(lab.root, b"\x00"))).kvs]
    assert keys == sorted(keys)
    assert {lab.key("a"), last} <= set(keys)
    await lab.do(Delete(last))


async def test_an_empty_key_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidRequestError):
        await lab.etcd.get(Get(b""))
    for op in (Get(b""), Put(b"", b"x"), Delete(b"")):
        with pytest.raises(InvalidRequestError):
            await lab.do(op)
    with pytest.raises(InvalidRequestError):
        await lab.do(guards=(Compare(b"", Target.VERSION, EQ, 0),))


async def test_what_one_connection_wrote_another_reads(lab: Lab) -> None:
    await lab.put("a", b"x")
    assert (await lab.connect().get(Get(lab.key("a")))).kvs[0].value == b"x"


# -- one transaction ------------------------------------------------------------------------------


async def test_all_writes_of_a_transaction_share_one_revision(lab: Lab) -> None:
    await lab.put("gone")
    before = await lab.revision()
    result = await lab.do(Put(lab.key("a"), b"1"), Put(lab.key("b"), b"2"), Delete(lab.key("gone")))
    assert result.revision == before + 1
    assert result.results == (
        WriteResult(before + 1),
        WriteResult(before + 1),
        WriteResult(before + 1),
    )
    assert {kv.mod_revision for kv in (await lab.all()).kvs} == {before + 1}


async def test_a_transaction_that_changes_nothing_does_not_raise_the_revision(lab: Lab) -> None:
    before = await lab.put("a")
    result = await lab.do(Get(lab.key("a")), Delete(lab.key("missing")), Txn((), ()))
    assert result.revision == before
    assert result.results[1] == WriteResult(before)
    assert (await lab.do()).revision == before


async def test_a_read_sees_the_writes_before_it_and_not_those_after_it(lab: Lab) -> None:
    revision = await lab.put("a", b"old")
    result = await lab.do(Get(lab.key("a")), Put(lab.key("a"), b"new"), Get(lab.key("a")))
    first, _, second = result.results
    assert isinstance(first, GetResult)
    assert isinstance(second, GetResult)
    assert (first.kvs[0].value, first.revision) == (b"old", revision)
    assert (second.kvs[0].value, second.revision) == (b"new", revision + 1)
    assert second.kvs[0].mod_revision == revision + 1


async def test_a_delete_takes_all_keys_of_its_range(lab: Lab) -> None:
    for name in "abcd":
        await lab.put(name)
    result = await lab.do(Delete(lab.key("b"), lab.key("d")), Get(lab.root, lab.end))
    _, left = result.results
    assert isinstance(left, GetResult)
    assert [kv.key for kv in left.kvs] == [lab.key("a"), lab.key("d")]


async def test_failed_guards_choose_the_failure_branch(lab: Lab) -> None:
    exists = Compare(lab.key("a"), Target.VERSION, GT, 0)
    request = Txn((exists,), (Put(lab.key("yes"), b""),), (Put(lab.key("no"), b""),))
    result = await lab.etcd.txn(request)
    assert not result.succeeded
    assert [kv.key for kv in (await lab.all()).kvs] == [lab.key("no")]
    await lab.put("a")
    assert (await lab.etcd.txn(request)).succeeded
    assert await lab.read("yes") is not None


async def test_a_key_may_be_written_once_per_transaction(lab: Lab) -> None:
    a = lab.key("a")
    put = Put(a, b"1")
    for ops in (
        (put, Put(a, b"2")),
        (put, Delete(a)),
        (Delete(a), put),
        (put, Delete(lab.root, lab.end)),
        (Delete(lab.root, lab.end), put),
        (put, Txn((), (Put(a, b"2"),))),
        (put, Txn((Compare(a, Target.VERSION, GT, 0),), (), (Put(a, b"2"),))),
        (Txn((), (put,)), Txn((), (Put(a, b"2"),))),
        (Delete(a), Txn((), (put,))),
        (Txn((), (Delete(a),)), put),
    ):
        with pytest.raises(InvalidRequestError):
            await lab.do(*ops)
        with pytest.raises(InvalidRequestError):  # in the branch that is not taken as well
            await lab.etcd.txn(Txn((), (), ops))
    assert (await lab.all()).count == 0


async def test_deletes_may_overlap_and_exclusive_branches_may_write_the_same_key(lab: Lab) -> None:
    a = lab.key("a")
    await lab.put("a")
    await lab.do(Delete(a), Delete(lab.root, lab.end))
    assert (await lab.all()).count == 0
    exists = Compare(a, Target.VERSION, GT, 0)
    await lab.do(Txn((exists,), (Put(a, b"yes"),), (Put(a, b"no"),)))
    kv = await lab.read("a")
    assert kv is not None
    assert kv.value == b"no"


async def test_a_transaction_holds_at_most_128_operations(lab: Lab) -> None:
    def reads(count: int) -> tuple[Get, ...]:
        return tuple(Get(lab.key(str(number))) for number in range(count))

    def nested(count: int) -> Txn:
        return Txn((), reads(count))

    guards = tuple(Compare(get.key, Target.VERSION, EQ, 0) for get in reads(129))
    for allowed in (nested(128), Txn((), (nested(127),)), Txn((), (nested(126), nested(126)))):
        await lab.etcd.txn(allowed)
    for refused in (
        nested(129),
        Txn((), (), reads(129)),
        Txn(guards, ()),
        Txn((), (nested(128),)),
        Txn((), (nested(126), nested(127))),
    ):
        with pytest.raises(InvalidRequestError):
            await lab.etcd.txn(refused)


async def test_a_refused_transaction_changes_nothing(lab: Lab) -> None:
    before = await lab.revision()
    with pytest.raises(LeaseNotFoundError):
        await lab.do(Put(lab.key("a"), b"1"), Put(lab.key("b"), b"2", lease_id=0x7FFF_0000_0001))
    assert (await lab.all()).count == 0
    assert await lab.revision() == before


async def test_too_much_data_is_refused(lab: Lab) -> None:
    with pytest.raises(RequestTooLargeError):
        await lab.put("a", bytes(1_600_000))
    with pytest.raises(RequestTooLargeError):
        await lab.put("a", bytes(8_000_000))
    await lab.put("a", bytes(1_400_000))


# -- putting without a value ----------------------------------------------------------------------


async def test_ignoring_the_value_raises_only_the_version(lab: Lab) -> None:
    created = await lab.put("a", b"kept")
    result = await lab.do(Put(lab.key("a"), b"", ignore_value=True), Get(lab.key("a")))
    read = result.results[1]
    assert isinstance(read, GetResult)
    assert read.kvs == (KeyValue(lab.key("a"), b"kept", created, created + 1, 2),)


async def test_ignoring_the_value_of_a_missing_key_or_giving_one_as_well_is_refused(
    lab: Lab,
) -> None:
    put = Put(lab.key("a"), b"", ignore_value=True)
    for op in (put, Txn((), (put,))):
        with pytest.raises(InvalidRequestError):
            await lab.do(op)
    # in a branch that is not taken it is not looked at
    await lab.do(Txn((Compare(lab.key("a"), Target.VERSION, GT, 0),), (put,)))
    await lab.put("a")
    with pytest.raises(InvalidRequestError):
        await lab.do(replace(put, value=b"new"))


async def test_64_concurrent_adders_count_exactly(lab: Lab) -> None:
    """A put that ignores the value, and a read in the same transaction: an atomic +1."""
    key = lab.key("counter")
    await lab.put("counter", b"base")
    adders = [lab.connect() for _ in range(8)]

    async def add(number: int) -> int:
        request = Txn((), (Put(key, b"", ignore_value=True), Get(key)))
        read = (await adders[number % 8].txn(request)).results[1]
        assert isinstance(read, GetResult)
        return read.kvs[0].version

    assert sorted(await asyncio.gather(*map(add, range(64)))) == list(range(2, 66))


# -- guards ---------------------------------------------------------------------------------------


async def test_guards_look_at_every_number_and_at_the_value_bytewise(lab: Lab) -> None:
    grant = await lab.etcd.grant(30)
    created = await lab.put("a", b"m")
    modified = await lab.put("a", b"m", grant.lease_id)
    sides: list[tuple[Target, int | bytes, int | bytes, int | bytes]] = [
        (target, number - 1, number, number + 1)
        for target, number in (
            (Target.VERSION, 2),
            (Target.CREATE, created),
            (Target.MOD, modified),
            (Target.LEASE, grant.lease_id),
        )
    ]
    for target, less, same, more in [*sides, (Target.VALUE, b"a\xff", b"m", b"ma")]:
        for operand, holds in ((less, GT), (same, EQ), (more, LT)):
            for relation in (EQ, GT, LT):
                wanted = relation is holds
                assert await lab.holds("a", target, relation, operand) is wanted, (target, relation)
    await lab.etcd.revoke(grant.lease_id)


async def test_a_missing_key_compares_as_zero_and_its_value_with_nothing(lab: Lab) -> None:
    for end in (None, "z"):
        for target in (Target.VERSION, Target.CREATE, Target.MOD, Target.LEASE):
            assert await lab.holds("a", target, EQ, 0, end)
            assert await lab.holds("a", target, LT, 1, end)
            assert not await lab.holds("a", target, GT, 0, end)
        for relation in (EQ, GT, LT):
            for value in (b"", b"x"):
                assert not await lab.holds("a", Target.VALUE, relation, value, end)


async def test_a_range_guard_must_hold_for_every_key(lab: Lab) -> None:
    for name in "abc":
        await lab.put(name, name.encode())
    assert await lab.holds("a", Target.VALUE, LT, b"c", "c")
    assert not await lab.holds("a", Target.VALUE, LT, b"c", "d")
    assert not await lab.holds("a", Target.VERSION, GT, 1, "d")


async def test_a_range_guard_catches_keys_changed_since_a_revision(lab: Lab) -> None:
    """But not one that was deleted."""

    async def since(target: Target) -> bool:
        return not await lab.holds("n/", target, LT, seen + 1, "n0")

    await lab.put("n/0")
    await lab.put("n/1")
    seen = await lab.put("n/2")
    await lab.delete("n/0")
    assert not await since(Target.MOD)
    assert not await since(Target.CREATE)
    await lab.put("n/1")
    assert await since(Target.MOD)
    assert not await since(Target.CREATE)
    await lab.put("n/3")
    assert await since(Target.CREATE)


async def test_guards_of_nested_transactions_look_at_the_state_before_all_of_it(lab: Lab) -> None:
    inner = Txn(
        (Compare(lab.key("a"), Target.VERSION, EQ, 0),),
        (Put(lab.key("b"), b"as before"),),
        (Put(lab.key("b"), b"as after"),),
    )
    result = await lab.do(Put(lab.key("a"), b"1"), inner)
    nested = result.results[1]
    assert isinstance(nested, TxnResult)
    assert nested.succeeded
    assert nested.revision == result.revision
    kv = await lab.read("b")
    assert kv is not None
    assert kv.value == b"as before"


async def test_nested_reads_see_earlier_writes_and_branches_keep_their_order(lab: Lab) -> None:
    missing = Compare(lab.key("x"), Target.VERSION, GT, 0)
    result = await lab.do(
        Put(lab.key("a"), b"1"),
        Txn((missing,), (), (Txn((), (Get(lab.key("a")), Put(lab.key("b"), b"2"))),)),
        Txn((), (Get(lab.key("b")),)),
    )
    _, second, third = result.results
    assert isinstance(second, TxnResult)
    assert not second.succeeded
    inner = second.results[0]
    assert isinstance(inner, TxnResult)
    read_a, put_b = inner.results
    assert isinstance(read_a, GetResult)
    assert isinstance(put_b, WriteResult)
    assert isinstance(third, TxnResult)
    read_b = third.results[0]
    assert isinstance(read_b, GetResult)
    assert read_a.kvs[0].value == b"1"
    assert read_b.kvs[0].value == b"2"
    assert put_b.revision == result.revision
