"""Who the members of a large world are: publishes the slices, and reads them back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rdzv_etcd.core.member import Seat
from rdzv_etcd.core.model import Control, NodeInfo, Round, Slices
from rdzv_etcd.core.rank_slices import assemble, cut
from rdzv_etcd.group.backoff import RETRY_S
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import place_in, slices_from


class Roster:
    """The leader's knowledge of a large world. In a small one the record names all members."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._world: tuple[str, int] | None = None
        self._members: tuple[str, ...] = ()
        self._complete = False
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
        """Remember who is in the world that this node has just formed."""
        if record.slices is not None:
            self._world = (record.run, record.number)
            self._members, self._complete = tuple(members), True

    async def fill(self, control: Control) -> tuple[Control, float]:
        """Return ``control`` with all members named in its record, and from when on it may be used.

        They are not all known after a loss of data, until they have put their slices back; after a
        TTL, who is still unknown is not there. Raises EtcdError, StateCorruptError.
        """
        record, context = control.formed, self._context
        if record is None or record.slices is None:
            return control, 0.0
        world = (record.run, record.number)
        if self._world != world or not self._complete:
            self._members, self._complete = await _read(context, record.number, record.slices)
            self._world = world
            if self._waits_for != control.round_revision:  # formed, or put back (once more)
                self._waits_for = control.round_revision
                self.incomplete_since_s = context.clock.now_s()
        filled = replace(control, round=replace(record, members=self._members))
        usable_s = self.incomplete_since_s + context.settings.timing.lease_ttl_s
        return filled, 0.0 if self._complete else usable_s


async def members_of(context: NodeContext, seat: Seat) -> tuple[str, ...]:
    """Return the node ids by rank, reading them if the world is large.

    Raises EtcdError, StateCorruptError.
    """
    if seat.slices is None:
        return seat.members
    members, _ = await _read(context, seat.round, seat.slices)
    return members


async def members_in(context: NodeContext, record: Round) -> tuple[str, ...]:
    """The same of a round's record."""
    if record.slices is None:
        return record.members
    members, _ = await _read(context, record.number, record.slices)
    return members


async def presences_of(context: NodeContext, seat: Seat) -> list[NodeInfo]:
    """Return the members' presences by rank, once all are there: a member that has lost its session
    puts its presence back.

    Raises EtcdError, StateCorruptError.
    """
    members = await members_of(context, seat)
    while True:
        result = await context.etcd.get(
            requests.read_nodes(context.keys), timeout_s=context.urgent_limit_s
        )
        found = {context.keys.node_id(kv.key): kv for kv in result.kvs}
        if all(member in found for member in members):
            places = [place_in(context.keys, found[member]) for member in members]
            there = [place for place in places if isinstance(place, NodeInfo)]
            if len(there) == len(members):  # whoever was accused and lives puts its presence back
                return there
        await context.clock.sleep(RETRY_S)


async def _read(context: NodeContext, number: int, slices: Slices) -> tuple[tuple[str, ...], bool]:
    result = await context.etcd.get(
        requests.read_slices(context.keys, number, slices), timeout_s=context.urgent_limit_s
    )
    return assemble(slices_from(result, slices.size), slices.size)
