"""Everybody's bytes to everybody: the members of a world give each other one value each."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from rdzv_etcd.core.member import Seat
from rdzv_etcd.core.model import display_names
from rdzv_etcd.errors import BarrierTimeoutError, EtcdError, StoreTimeoutError
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.roster import members_of
from rdzv_etcd.group.world_over import unless_over
from rdzv_etcd.kv.store import KeyValueStore


class Exchange:
    """All exchanges of one world, on one of its members. They are counted: the first of every
    member belongs together, then the second."""

    def __init__(self, node: Node, seat: Seat) -> None:
        context = node.context
        self._node = node
        self._seat = seat
        self._store = KeyValueStore(
            context.etcd,
            context.keys.exchange(seat.round, seat.run),
            seat.job_lease,
            writer=context.identity.node_id,
            clock=context.clock,
        )
        self._done = 0
        self._one_at_a_time = asyncio.Lock()

    async def give(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give ``data``; return what every member gave, by rank, once all have.

        Raises BarrierTimeoutError (names who is missing; to call it again is to try again),
        WorldOverError, JobClosedError, RequestTooLargeError, RendezvousFailedError if this node
        leaves, and EtcdError.
        """
        until_s = self._node.context.clock.now_s() + timeout_s
        async with self._one_at_a_time:
            turn = self._done + 1
            give = partial(self._give, turn, data, until_s)
            try:
                all_data = await unless_over(self._node, self._seat, f"exchange {turn}", give)
            except StoreTimeoutError as error:
                raise await self._timeout(turn, timeout_s, error) from None
            self._done = turn
            return all_data

    async def _give(self, turn: int, data: bytes, until_s: float) -> list[bytes]:
        seat = self._seat
        await self._store.set(_key(turn, seat.rank), data, self._left_s(until_s))
        everybody = [_key(turn, rank) for rank in range(seat.size)]
        return await self._store.multi_get(everybody, self._left_s(until_s))

    def _left_s(self, until_s: float) -> float:
        return max(0.0, until_s - self._node.context.clock.now_s())

    async def _timeout(
        self, turn: int, timeout_s: float, error: StoreTimeoutError
    ) -> BarrierTimeoutError:
        seat = self._seat
        text = f"exchange {turn} of round {seat.round}: not all gave within {timeout_s:g} s"
        ranks = [int(key.rpartition("/")[2]) for key in error.keys]
        with contextlib.suppress(EtcdError):
            members = await members_of(self._node.context, seat)
            missing = [members[rank] for rank in ranks]
            return BarrierTimeoutError(
                f"{text}: {len(missing)} of {seat.size} members are missing "
                f"({display_names(missing)})",
                missing=missing,
            )
        return BarrierTimeoutError(f"{text}: {len(ranks)} of {seat.size} members are missing")


def _key(turn: int, rank: int) -> str:
    return f"{turn}/{rank}"
