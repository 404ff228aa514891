"""The members of a large world: publishes the slices that name them, and reads them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.etcd.reads import own_limit
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.views import read_pages
from rdzv_etcd.node.waiting import RETRY_S
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Control, NodeInfo, Round, Slices
from rdzv_etcd.protocol.ranks import assemble, cut
from rdzv_etcd.protocol.views import place_in, slices_from


class Roster:
    """The leader's knowledge of a large world. In a small one the record names all members."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._world: tuple[str, int] | None = None
        self._members: tuple[str, ...] = ()
        self._complete = False
        self._asked: tuple[str, int] | None = None
        """The world whose members this node has asked for their slices."""
        self._waits_for = 0
        self.incomplete_since_s = 0.0
        """When this node began to lead a world of which it did not know all members."""

    async def publish(self, control: Control, record: Round, members: Sequence[str]) -> bool:
        """Put the slices of ``record``, which is about to be published; ``False`` if the lead is
        gone. Raises EtcdError."""
        slices = record.slices
        if slices is None:
            return True
        context = self._context
        txns = requests.publish_slices(context.keys, control, record, slices, cut(members, slices))
        # Doing it twice does no harm: an edition is written by one leader, with one content.
        put = partial(context.etcd.txn, timeout_s=context.urgent_limit_s, repeatable=True)
        *others, last = txns
        if not all(result.succeeded for result in await asyncio.gather(*map(put, others))):
            return False
        return (await put(last)).succeeded  # after the others: the record needs to look for one

    def note(self, record: Round, members: Sequence[str]) -> None:
        """Remember the members of the world that this node has just formed."""
        if record.slices is not None:
            self._world = (record.run, record.number)
            self._members, self._complete = tuple(members), True

    async def fill(self, control: Control) -> tuple[Control, float]:
        """Return ``control`` with all members named in its record, and from when on it may be used.

        They are not all known after a loss of data, or if another program has written among the
        slices, until they have put these back; after a TTL, a member still unknown is not there.
        Raises EtcdError.
        """
        record, context = control.formed, self._context
        if record is None or record.slices is None:
            return control, 0.0
        world = (record.run, record.number)
        if self._world != world or not self._complete:
            self._members, self._complete, problems = await read_members(
                context.etcd, context.keys, world[1], record.slices, lambda: context.urgent_limit_s
            )
            self._world = world
            # After a loss of data they put them back without being asked.
            if not self._complete and (problems or record.epoch_fixed is None):
                await self._ask(control, record, problems)
            if self._waits_for != control.round_revision:  # formed, or put back (once more)
                self._waits_for = control.round_revision
                self.incomplete_since_s = context.clock.now_s()
        filled = replace(control, round=replace(record, members=self._members))
        usable_s = self.incomplete_since_s + context.session.longest_ttl_s
        return filled, 0.0 if self._complete else usable_s

    async def _ask(
        self, control: Control, record: Round, problems: Sequence[StateCorruptError]
    ) -> None:
        """Ask the members to put their slices back, once in a world. Raises EtcdError."""
        context, world = self._context, (record.run, record.number)
        if self._asked == world:
            return
        again = replace(record, epoch_fixed=control.epoch)
        result = await context.etcd.txn(
            requests.ask_for_slices(context.keys, control, again),
            timeout_s=context.urgent_limit_s,
        )
        if not result.succeeded:
            await context.control.refresh()
            return
        self._asked = world
        context.show_written(result.revision, round=again, round_revision=result.revision)
        why = problems[0] if problems else "a part of them is gone"
        context.log.warn(f"this node asks for the members of round {record.number}: {why}")


async def members_of(context: NodeContext, world: Seat | Round) -> tuple[str, ...]:
    """Return the node ids by rank, reading them if the world is large.

    Raises EtcdError, StateCorruptError.
    """
    if world.slices is None:
        return world.members
    number = world.round if isinstance(world, Seat) else world.number
    members, complete, problems = await read_members(
        context.etcd, context.keys, number, world.slices, lambda: context.urgent_limit_s
    )
    if problems and not complete:
        raise problems[0]
    return members


async def presences_of(context: NodeContext, seat: Seat) -> list[NodeInfo]:
    """Return the members' presences by rank, once all are there: a member that has lost its session
    puts its presence back, and one that was accused as well.

    Raises EtcdError, StateCorruptError.
    """
    members = await members_of(context, seat)
    while True:
        result = await read_pages(context.etcd, context.keys.nodes)
        found = {context.keys.node_id(kv.key): kv for kv in result.kvs}
        places = [place_in(context.keys, found[each]) for each in members if each in found]
        there = [place for place in places if isinstance(place, NodeInfo)]
        if len(there) == len(members):
            return there
        await context.clock.sleep(RETRY_S)


async def with_members(
    etcd: Etcd, keys: JobKeys, control: Control, limit_s: Callable[[], float | None] = own_limit
) -> Control:
    """Name the members of a large world in its record, as that of a small one does. Raises
    EtcdError."""
    record = control.round
    if record is None or record.slices is None or record.members:
        return control
    members, *_ = await read_members(etcd, keys, record.number, record.slices, limit_s)
    return replace(control, round=replace(record, members=members))


async def read_members(
    etcd: Etcd, keys: JobKeys, number: int, slices: Slices, limit_s: Callable[[], float | None]
) -> tuple[tuple[str, ...], bool, list[StateCorruptError]]:
    """Read the slices of a large world: its members by rank, whether all are known, and what is
    wrong with slices that cannot be read. Raises EtcdError."""
    result = await read_pages(etcd, keys.edition(number, slices.edition), limit_s=limit_s)
    found, problems = slices_from(result, slices.size)
    return *assemble(found, slices.size), problems
