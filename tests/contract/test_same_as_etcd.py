"""Random requests have the same results, revisions and watch histories in memory and on etcd."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Etcd,
    Get,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    prefix_end,
)
from rdzv_etcd.settings.connection import Connection, Endpoint
from rdzv_etcd.testing import MemoryEtcd
from tests.etcd.tools import soon
from tests.support.servers import EtcdBinary, EtcdServer

_NAMES = "abcd"
_LEASES = 3
_REVISIONS = ("revision", "create_revision", "mod_revision")


@dataclass(frozen=True)
class GrantSlot:
    slot: int


@dataclass(frozen=True)
class RevokeSlot:
    slot: int


Step: TypeAlias = "Txn | Get | GrantSlot | RevokeSlot"

# Drawn with key names, lease slots and relative revisions; made real by `Side`.
_names = st.sampled_from([name.encode() for name in _NAMES])
_ends = st.none() | st.sampled_from([name.encode() for name in _NAMES + "z"])
_relations = st.sampled_from(Relation)
_values = st.binary(max_size=1)
_gets = st.builds(
    Get, _names, _ends, st.integers(0, 3), keys_only=st.booleans(), count_only=st.booleans()
)
_puts = st.builds(
    Put,
    _names,
    _values,
    st.sampled_from([0, 0, 0, 1, 1, 1, 2, 3]),
    ignore_value=st.sampled_from([False, False, True]),
).map(lambda put: dataclasses.replace(put, value=b"") if put.ignore_value else put)
_deletes = st.builds(Delete, _names, _ends)
_guards = st.one_of(
    st.builds(
        Compare,
        _names,
        st.sampled_from([Target.VERSION, Target.CREATE, Target.MOD, Target.LEASE]),
        _relations,
        st.integers(0, 6),
        _ends,
    ),
    st.builds(Compare, _names, st.just(Target.VALUE), _relations, _values, _ends),
)


def _txns(ops: st.SearchStrategy[Op]) -> st.SearchStrategy[Txn]:
    return st.builds(
        Txn,
        st.lists(_guards, max_size=2).map(tuple),
        st.lists(ops, max_size=4).map(tuple),
        st.lists(ops, max_size=3).map(tuple),
    )


_plain: st.SearchStrategy[Op] = st.one_of(_gets, _puts, _puts, _deletes)
_nested: st.SearchStrategy[Op] = st.one_of(_plain, _plain, _txns(_plain))
_single = st.one_of(_puts, _puts, _deletes).map(lambda op: Txn((), (op,)))
_slots = st.sampled_from([1, 1, 2, 3])
_steps = st.one_of(
    _single,
    _single,
    _txns(st.one_of(_plain, _plain, _txns(_nested))),
    _gets,
    st.builds(GrantSlot, _slots),
    st.builds(RevokeSlot, _slots),
)


class Side:
    """One of the two etcds; speaks in names, slots and relative revisions."""

    def __init__(self, etcd: Etcd, root: bytes, lease_base: int) -> None:
        self._etcd = etcd
        self._root = root
        self._lease_base = lease_base
        self._base = 0

    async def begin(self) -> None:
        self._base = (await self._etcd.get(Get(self._root))).revision

    async def step(self, step: Step) -> object:
        """Do one step; return its result or the kind of its error."""
        try:
            return self._relative(await self._do(step))
        except EtcdError as error:
            return type(error).__name__

    async def history(self) -> list[object]:
        """Return all events since the beginning."""
        last = self._root + b"~"
        await self._etcd.txn(Txn((), (Put(last, b""),)))
        end = prefix_end(self._root)
        watch = self._etcd.watch(self._root, end, start_revision=self._base + 1)
        seen: list[object] = []
        done = False
        while not done:
            for event in (await soon(anext(aiter(watch)))).events:
                done = event.kv.key == last
                seen.append((event.kind, self._relative(event.kv)))
        await watch.close()
        return seen

    async def end(self) -> None:
        for slot in range(1, _LEASES + 1):
            await self._etcd.revoke(self._lease_base + slot)
        await self._etcd.txn(Txn((), (Delete(self._root, prefix_end(self._root)),)))
        await self._etcd.close()

    async def _do(self, step: Step) -> object:
        if isinstance(step, GrantSlot):
            return await self._etcd.grant(300, lease_id=self._lease_base + step.slot)
        if isinstance(step, RevokeSlot):
            return await self._etcd.revoke(self._lease_base + step.slot)
        if isinstance(step, Get):
            return await self._etcd.get(self._absolute(step))
        return await self._etcd.txn(self._absolute(step))

    def _absolute(self, value: Any) -> Any:
        """Translate a drawn request into a real one."""

        def change(owner: Any, name: str, now: Any) -> Any:
            if name in ("key", "range_end") and now is not None:
                return self._root + now
            if name == "lease_id" and now:
                return self._lease_base + now
            if isinstance(owner, Compare) and name == "operand" and isinstance(now, int):
                return now + self._operand_base(owner.target) if now else 0
            return now

        return _changed(value, change)

    def _operand_base(self, target: Target) -> int:
        if target in (Target.CREATE, Target.MOD):
            return self._base
        return self._lease_base if target is Target.LEASE else 0

    def _relative(self, value: Any) -> Any:
        """Make a result comparable: revisions count from the beginning."""

        def change(_owner: Any, name: str, now: Any) -> Any:
            return now - self._base if name in _REVISIONS and now else now

        return _changed(value, change)


def _changed(value: Any, change: Callable[[Any, str, Any], Any]) -> Any:
    """Return the value with all fields in it, however deep, as ``change`` returns them."""
    if isinstance(value, tuple):
        return tuple(_changed(part, change) for part in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    made = {name: _changed(change(value, name, now), change) for name, now in fields.items()}
    return dataclasses.replace(value, **made)


def _either(outcomes: set[object], step: Step) -> bool:
    """Whether both errors are right: of a put with two faults etcd 3.7 names the other one."""
    puts = step.puts() if isinstance(step, Txn) else ()
    return outcomes == {"InvalidRequestError", "LeaseNotFoundError"} and any(
        put.lease_id and put.ignore_value for put in puts
    )


@given(steps=st.lists(_steps, min_size=10, max_size=25))
@settings(max_examples=60, deadline=None)
def test_random_requests_have_the_same_results(
    etcd_binary: EtcdBinary,
    shared_server: Callable[[EtcdBinary], EtcdServer],
    steps: list[Step],
) -> None:
    server = shared_server(etcd_binary)
    asyncio.run(_compare(Endpoint(server.host, server.port), steps))


async def _compare(endpoint: Endpoint, steps: list[Step]) -> None:
    root = f"same/{uuid.uuid4().hex[:12]}/".encode()
    lease_base = random.SystemRandom().randrange(1 << 40, 1 << 60)
    real = Side(EtcdClient(Connection((endpoint,))), root, lease_base)
    async with MemoryEtcd() as memory:
        fake = Side(memory.connect(), root, lease_base)
        await asyncio.gather(real.begin(), fake.begin())
        try:
            for step in (GrantSlot(1), *steps):
                expected = await real.step(step)
                got = await fake.step(step)
                assert got == expected or _either({got, expected}, step), step
            assert await fake.history() == await real.history()
        finally:
            await real.end()
