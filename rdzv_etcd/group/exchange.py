"""Everybody's bytes to everybody: the members of a world give each other one value each."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from rdzv_etcd.arguments import Bytes, as_bytes, seconds
from rdzv_etcd.core.member import Seat
from rdzv_etcd.core.names import display_names
from rdzv_etcd.errors import (
    BarrierTimeoutError,
    EtcdError,
    MisuseError,
    RequestTooLargeError,
    StoreTimeoutError,
)
from rdzv_etcd.group.after_losses import after_losses
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.roster import members_of
from rdzv_etcd.group.world_over import unless_over
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.kv.writes import too_large
from rdzv_etcd.schema.requests import record_is


class Exchange:
    """All exchanges of one world, on one of its members. They are counted: the first of every
    member belongs together, then the second.

    Who gives in a turn has taken all of the turn before, for which everybody had to be done with
    the one before that. So it deletes what it gave there, and two turns are all that is ever kept.
    A turn that was done, and whose caller was interrupted before it had the values, is owed to it:
    the next call returns them.
    Whoever has done a turn cannot know who else has. So what a member gave in its last two it also
    keeps in memory, and puts it again, in a call or not, whenever etcd may have lost it.
    """

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
        self._given: dict[int, bytes] = {}
        """What this member has given in the last turn that was done, for others may be in it yet,
        and in the one that is not done: some may have read it."""
        self._keeping: asyncio.Task[None] | None = None
        self._untold: list[list[list[bytes]]] = []
        """What calls have taken which did not return."""
        self._one_at_a_time = asyncio.Lock()

    def not_told(self, taken: list[list[bytes]]) -> None:
        """Note that a call does not return; thread-safe."""
        self._untold.append(taken)

    async def give(
        self, data: Bytes, timeout_s: float, taken: list[list[bytes]] | None = None
    ) -> list[bytes]:
        """Give ``data``; return what every member gave, by rank, once all have. It is noted in
        ``taken`` as soon as that is decided.

        Raises BarrierTimeoutError (names who is missing; to call it again is to try again, and what
        was given first stands), WorldOverError, JobClosedError, MisuseError for what is no bytes
        or no time limit, and while another call is under way, RequestTooLargeError,
        RendezvousFailedError if this node leaves, and EtcdError.
        """
        given = as_bytes("what is given in an exchange", data)
        limit_s = seconds(timeout_s)
        until_s = self._node.context.clock.now_s() + limit_s
        if self._one_at_a_time.locked():
            raise MisuseError(
                "this member is in an exchange already: exchanges are counted, and which of two at "
                "the same time is the first, no other member could know"
            )
        taken = [] if taken is None else taken
        async with self._one_at_a_time:
            while self._untold:
                taken += self._untold.pop()
            if taken:
                return taken[0]
            if self._keeping is None:
                keep = after_losses(self._node, self._seat, self._put_back)
                self._keeping = self._node.attend(keep, "exchange")
            turn = self._done + 1
            try:
                all_data = await unless_over(
                    self._node,
                    self._seat,
                    f"exchange {turn}",
                    partial(self._give, turn, given, until_s),
                    partial(self._take, turn, 0.0),
                )
            except StoreTimeoutError as error:
                raise await self._timeout(turn, limit_s, error) from None
            self._done = turn
            self._given.pop(turn - 1, None)
            taken.append(all_data)
            return all_data

    async def _give(self, turn: int, data: bytes, until_s: float) -> list[bytes]:
        given = self._given.setdefault(turn, data)
        try:
            await self._put(turn, given, self._left_s(until_s))
        except RequestTooLargeError as error:
            del self._given[turn]
            raise too_large(f"what this member gives in exchange {turn}", len(given)) from error
        return await self._take(turn, self._left_s(until_s))

    async def _put(self, turn: int, data: bytes, timeout_s: float) -> None:
        key = _key(turn, self._seat.rank)
        if turn <= 2:
            await self._store.set(key, data, timeout_s)
        else:
            await self._store.set_instead(key, data, _key(turn - 2, self._seat.rank), timeout_s)

    async def _take(self, turn: int, timeout_s: float) -> list[bytes]:
        everybody = [_key(turn, rank) for rank in range(self._seat.size)]
        return await self._store.multi_get(everybody, timeout_s)

    async def _put_back(self, record: int) -> bool:
        """Put again what is missing, if that is still the round's record; tell whether it is.

        One request per value: two may be too large. A late copy of one may bring a value back that
        was deleted since; it goes with the world.
        """
        given = {_key(turn, self._seat.rank): data for turn, data in self._given.items()}
        if await self._store.check(list(given), None):
            return True
        guard = record_is(self._node.context.keys, record)
        for key, data in given.items():
            if not await self._store.put_back(guard, key, data):
                return False
        return True

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
