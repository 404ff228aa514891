"""A named barrier among the members of a round. Drives etcd's port; knows no torch."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from rdzv_etcd.core.model import display_names
from rdzv_etcd.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    EtcdUnavailableError,
    RevisionRegressedError,
)
from rdzv_etcd.etcd.api import Etcd, Get, GetResult, Put, Txn
from rdzv_etcd.etcd.puts import puts_after
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.roster import members_of
from rdzv_etcd.group.standing import World
from rdzv_etcd.schema.keys import KeyRange

_DONE = b"done"
_ARRIVED = b"arrived/"


async def wait_at_barrier(node: Node, world: World, name: str, timeout_s: float) -> None:
    """Wait until every member of ``world`` has called this with the same ``name``.

    The last to arrive says so in one key that the others watch: N notifications, not N². Raises
    BarrierTimeoutError (names who is missing), BarrierBrokenError if the round changes meanwhile,
    RendezvousFailedError if this node leaves, and EtcdError.
    """
    context = node.context
    etcd = context.etcd
    # The epoch, because a run that begins anew after a loss of the record counts its rounds anew,
    # while arrivals from before are still there: they live on their nodes' sessions.
    place = context.keys.barrier(world.round, f"{world.epoch} {name}")
    node_id = context.identity.node_id
    done = place.start + _DONE
    arrived = await etcd.txn(
        Txn(
            (),
            (
                Put(place.start + _ARRIVED + node_id.encode(), b"", context.session.lease_id),
                Get(place.start + _ARRIVED, _end(place), count_only=True),
                Get(done),
            ),
        ),
        repeatable=True,
    )
    _, count, already = arrived.results
    if not isinstance(count, GetResult) or not isinstance(already, GetResult):
        raise TypeError("etcd answered a read with something else")
    if already.count:
        return
    if count.count >= world.size:
        await etcd.txn(Txn((), (Put(done, b"", world.job_lease),)), repeatable=True)
        return
    passed = functools.partial(_passed, etcd, done, arrived.revision)
    try:
        await context.clock.wait_for(_first_of(passed, node, world, name), timeout_s)
    except TimeoutError as error:
        missing = await _missing(context, place, world)
        raise BarrierTimeoutError(
            f"barrier {name!r} of round {world.round}: after {timeout_s:g} s "
            f"{len(missing)} of {world.size} members are missing ({display_names(missing)})"
        ) from error


def _end(place: KeyRange) -> bytes:
    return place.start + _ARRIVED[:-1] + bytes([_ARRIVED[-1] + 1])


async def _first_of(
    passed: Callable[[], Awaitable[None]], node: Node, world: World, name: str
) -> None:
    passing = asyncio.ensure_future(passed())
    breaking = asyncio.ensure_future(node.changed())
    try:
        await asyncio.wait({passing, breaking}, return_when=asyncio.FIRST_COMPLETED)
        if passing.done():
            passing.result()
            return
        breaking.result()
        raise BarrierBrokenError(
            f"barrier {name!r}: round {world.round} is over, join the next one"
        )
    finally:
        passing.cancel()
        breaking.cancel()
        await asyncio.wait({passing, breaking})


async def _passed(etcd: Etcd, done: bytes, revision: int) -> None:
    """Return when ``done`` has been put, which it was not at ``revision``."""
    async with puts_after(etcd, done, None, revision) as (watch, missed):
        if missed:
            found = await etcd.get(Get(done, count_only=True))
            if found.count:
                return
            if found.revision < revision:  # the arrivals are gone, so nobody will put it
                raise RevisionRegressedError(revision, found.revision)
        async for _ in watch:
            return
    raise EtcdUnavailableError("the connection was closed while this node was at a barrier")


async def _missing(context: NodeContext, place: KeyRange, world: World) -> list[str]:
    prefix = place.start + _ARRIVED
    result = await context.etcd.get(Get(prefix, _end(place), keys_only=True))
    here = {kv.key[len(prefix) :].decode(errors="replace") for kv in result.kvs}
    members = await members_of(context, world)
    return [member for member in members if member not in here]
