"""Barriers and exchanges among the members of a world. Drives etcd's port; knows no torch.

Both are one protocol: each member puts a value and waits until all have put theirs. At a barrier
the value is empty, and counts only while its member waits; in an exchange it stays. The
transactions are in :mod:`rdzv_etcd.protocol.collective_requests`.

A name may be used repeatedly: each use is a *turn*, and every member counts its own turns. The
counts agree, because a turn is done for all members or for none: it is done by the transaction that
finds a value of each, and a member takes its value back only in one that etcd refuses if another
value was put meanwhile. The member that finds a turn done writes that to one key, which the others
watch: N notifications, not N².

A call that timed out may be made again. One that is interrupted may be done without its caller's
knowing, so it ends this node's part in the world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from rdzv_etcd.arguments import Bytes, as_bytes, check_name, seconds
from rdzv_etcd.clock import race
from rdzv_etcd.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    EtcdError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    MisuseError,
    OutcomeUnknownError,
    RdzvEtcdError,
    RequestTooLargeError,
    StateCorruptError,
    WatchLostError,
    WorldClosedError,
    WorldOverError,
)
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.etcd.reads import PartSize, puts_after, read_range
from rdzv_etcd.kv.writes import too_large
from rdzv_etcd.names import display_names
from rdzv_etcd.node.leave import why_interrupted
from rdzv_etcd.node.node import Node
from rdzv_etcd.node.slices import members_of
from rdzv_etcd.node.waiting import RETRY_S, Backoff
from rdzv_etcd.protocol import collective_requests as requests
from rdzv_etcd.protocol.collective_requests import Seen
from rdzv_etcd.protocol.keys import CollectiveKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.requests import record_is
from rdzv_etcd.world.world_over import unless_over, until_over
from rdzv_etcd.world_change import MovedOn

_LAST_LOOK_S = 5.0
"""How long a call that timed out may take to read who is missing, or that all have given."""


class Collectives:
    """All barriers and exchanges of one world, on one of its members."""

    def __init__(self, node: Node, seat: Seat) -> None:
        self._node = node
        self._seat = seat
        self._by_name: dict[str | None, Collective] = {}
        self._keeping: asyncio.Task[None] | None = None

    async def barrier(self, name: str, timeout_s: float) -> None:
        """Wait until every member has called this with the same name, as often as this one.

        Raises BarrierTimeoutError (names the missing members; the call may be made again),
        BarrierBrokenError if the world is over, JobClosedError if the job is closed, MisuseError
        for an invalid name or time limit, and while another call with this name is under way,
        RendezvousFailedError if this node leaves, and EtcdError. If the call ends before all
        members are there, this member does not count as being there. If it is cancelled, this node
        leaves the world.
        """
        check_name("barrier", name)
        limit_s = seconds(timeout_s)
        await self._named(name).meet(b"", limit_s)

    async def exchange(self, data: Bytes, timeout_s: float) -> list[bytes]:
        """Give ``data``; return the values of all members by rank, once all have given theirs.

        Calls are counted: the first calls of all members belong together, then the second ones.
        Raises as :meth:`barrier`, but WorldOverError if the world is over, MisuseError also if
        ``data`` is not bytes, and RequestTooLargeError. The value given first stands, also after an
        error.
        """
        given = as_bytes("what is given in an exchange", data)
        return await self._named(None).meet(given, seconds(timeout_s))

    def _named(self, name: str | None) -> Collective:
        """Return the barrier of that name; ``None``: the exchanges."""
        if name not in self._by_name:
            self._by_name[name] = Collective(self._node, self._seat, name)
        if self._keeping is None:
            self._keeping = self._node.attend(self._keep(), "barriers and exchanges")
        return self._by_name[name]

    async def _keep(self) -> None:
        """Until the world is over, put this member's values again whenever etcd may have lost them:
        other members may wait for them. Calls that are under way do the same for themselves."""
        context = self._node.context
        backoff = Backoff(context.session.renewal_period_s)

        def is_over() -> bool:
            return self._node.is_gone or self._node.change_of(self._seat) is not None

        def unsure() -> list[Collective]:
            return [each for each in self._by_name.values() if each.is_unsure]

        while True:
            await context.wakeup.wait(when=lambda: is_over() or bool(unsure()))
            if is_over():
                return
            try:
                for each in unsure():
                    await each.put_right()
                if unsure():  # the record is another one, which this node will see soon
                    await context.clock.sleep(RETRY_S)
                backoff.reset()
            except EtcdError as error:
                await context.clock.sleep(backoff.after(error))


class Collective:
    """One name in one world, on one of its members."""

    def __init__(self, node: Node, seat: Seat, name: str | None) -> None:
        """``name``: a barrier's; ``None`` for the world's exchanges."""
        context = node.context
        place = (context.keys, seat.round, seat.epoch)
        self._node = node
        self._context = context
        self._seat = seat
        self._name = name
        self._keys = (
            CollectiveKeys.of_exchange(*place)
            if name is None
            else CollectiveKeys.of_barrier(*place, name)
        )
        self._passed = 0
        """How many turns this member has done."""
        self._done = 0
        """How many turns are done, as far as this member knows."""
        self._given: dict[int, bytes] = {}
        """This member's values, by turn, that others may need: in an exchange those of its last
        turn and of the next one, at a barrier the one of the next turn while it waits."""
        self._taken: dict[int, bytes] = {}
        """The values of the next turn that were read so far, by rank."""
        self._part = PartSize()
        self._may_count = False
        """Whether others may find a value of this member in the next turn."""
        self._mark = 0
        """The revision of this member's mark, as far as it knows."""
        self._record = 0
        """The revision of the round's record when this member wrote last, 0 if it never has."""
        self._sure: tuple[int, int] | None = None
        """The :meth:`_doubt` at which etcd held what it should."""
        self._is_called = False
        self._lock = asyncio.Lock()
        """Held by the task that writes for this member."""

    @property
    def _what(self) -> str:
        return f"exchange {self._passed + 1}" if self._name is None else f"barrier {self._name!r}"

    # -- a call -----------------------------------------------------------------------------------

    async def meet(self, data: bytes, limit_s: float) -> list[bytes]:
        """Give ``data`` in the next turn, and wait until all have given; see :class:`Collectives`.

        Returns what all gave, by rank; at a barrier nothing.
        """
        change, turn = self._node.change_of(self._seat), self._passed + 1
        if isinstance(change, MovedOn) or (change is not None and turn not in self._given):
            raise self._broken(await until_over(self._node, self._seat, self._what))
        if self._is_called:
            raise MisuseError(
                "this member is in an exchange already: exchanges are counted, so two at the same "
                "time have no order that the other members could know"
                if self._name is None
                else f"this member waits at {self._what} already: let one thread call it, or use a "
                "barrier with another name for each thread"
            )
        self._is_called = True
        try:
            return await self._meet(data, limit_s)
        except asyncio.CancelledError as error:
            if not self._node.is_gone:
                ending = self._end_part(why_interrupted(error, self._what))
                await asyncio.shield(self._node.attend(ending, "interrupted call"))
            raise
        finally:
            self._is_called = False
            if self.is_unsure:
                self._context.wakeup.notify()

    async def _end_part(self, why: str) -> None:
        """Leave the world: the caller does not know the outcome of its call."""
        leaving = self._node.leave_world(self._seat, why)  # this first: the world is over at once
        await asyncio.gather(leaving, self._give_up(self._passed + 1))

    async def _meet(self, data: bytes, limit_s: float) -> list[bytes]:
        turn = self._passed + 1
        try:
            work = partial(self._give_and_take, turn, data)
            calling = unless_over(self._node, self._seat, self._what, work, grace_s=0.0)
            await self._context.clock.wait_for(calling, limit_s)
        except (RdzvEtcdError, TimeoutError) as error:
            missing = await self._give_up(turn)
            if self._done >= turn:  # though there is no time left
                with suppress(EtcdError, TimeoutError):
                    await self._context.clock.wait_for(self._read_all(turn), _LAST_LOOK_S)
            if self._done < turn or not self._has_read_all:
                if isinstance(error, TimeoutError):
                    raise await self._timeout(limit_s, missing) from None
                raise self._broken(error) from None
        taken = [self._taken[rank] for rank in sorted(self._taken)]
        self._passed, self._taken, self._may_count = turn, {}, False
        self._given = {turn: self._given[turn]} if self._name is None else {}
        return taken

    async def _give_and_take(self, turn: int, data: bytes) -> None:
        data = self._given.setdefault(turn, data)
        try:
            await self._until_all_gave(turn)
        except RequestTooLargeError as error:
            del self._given[turn]
            self._may_count = False
            raise too_large(f"what this member gives in {self._what}", len(data)) from error
        await self._read_all(turn)

    @property
    def _has_read_all(self) -> bool:
        return self._name is not None or len(self._taken) == self._seat.size

    async def _read_all(self, turn: int) -> None:
        """Read the values of an exchange, in parts: a call that is made again continues with those
        that are missing."""
        end = self._keys.all_given(turn).end
        self._part.expect(len(self._given.get(turn, b"")))
        while not self._has_read_all:
            first = next(rank for rank in range(self._seat.size) if rank not in self._taken)
            start = self._keys.given(turn, first)
            with suppress(EtcdUnavailableError):  # this node's own limit is the caller's
                async for part in read_range(self._context.etcd, start, end, size=self._part):
                    self._taken.update({self._keys.rank(kv.key): kv.value for kv in part.kvs})
            if not self._has_read_all:  # etcd lost some: their members put them again
                await self._context.clock.sleep(RETRY_S)

    # -- giving -----------------------------------------------------------------------------------

    async def _until_all_gave(self, turn: int) -> None:
        """Give, again whenever etcd may have lost the value, until all have given."""
        async with self._lock:
            while True:
                try:
                    if await self._give_and_wait(turn):
                        return
                except (
                    EtcdUnavailableError,
                    LeaseNotFoundError,
                    OutcomeUnknownError,
                    WatchLostError,
                ):
                    # The job's lease or the data are being put back; or etcd is away, and with it
                    # nothing that was given is lost: this node's own limit is the caller's.
                    await self._context.clock.sleep(RETRY_S)

    async def _give_and_wait(self, turn: int) -> bool:
        """Give, and return whether the turn is done; ``False``: try again."""
        clock, wakeup, doubt = self._context.clock, self._context.wakeup, self._doubt()
        is_known = not self._record or self._sure == doubt
        seen = await (self._put(turn) if is_known else self._put_all(turn))
        if seen is None:  # because of a change that this node will see soon
            await wakeup.wait(clock.now_s() + RETRY_S, when=lambda: self._doubt() != doubt)
            return False
        self._sure = doubt
        if await self._is_done(turn, seen):
            return True
        announced, _ = await race(
            self._until_announced(turn, seen.revision),
            wakeup.wait(when=lambda: self._doubt() != doubt),
        )
        if announced is None:
            return False
        announced.result()
        self._done = max(self._done, turn)
        return True

    def _doubt(self) -> tuple[int, int]:
        """Return a value that changes whenever etcd may have lost keys."""
        control = self._context.control
        return control.view.round_revision, control.breaks

    def _is_open(self) -> bool:
        """Whether a value may be put, as far as this node knows: the world is not over, and its
        record is there. A lost record has to be put back first."""
        return self._node.change_of(self._seat) is None and bool(self._node.control.round_revision)

    async def _put(self, turn: int) -> Seen | None:
        """Put this member's value of ``turn``, and return what is there then; ``None``: the world
        is not as this node knows it."""
        while self._is_open():
            self._record = self._node.control.round_revision
            self._may_count = True
            txn = requests.give(
                self._keys,
                self._seat.rank,
                turn,
                self._given[turn],
                self._seat.job_lease,
                mark=self._mark,
                record=record_is(self._context.keys, self._record),
            )
            result = await self._context.etcd.txn(txn, repeatable=True)
            seen, before = requests.seen_in(self._keys, turn, result), self._mark
            self._mark = seen.mark_revision
            if result.succeeded or (self._mark != before and requests.gives(seen.mark, turn)):
                return seen
            if self._mark == before:
                return None
        return None

    async def _is_done(self, turn: int, seen: Seen) -> bool:
        """Return whether all have given in ``turn``, as this member has; if so, announce it."""
        if seen.turns < turn and seen.count < self._seat.size:
            return False
        self._done = max(self._done, turn)
        await self._announce(seen.done)
        return True

    async def _announce(self, latest: KeyValue | None) -> None:
        """Write how many turns are done, if the ``latest`` announcement is of fewer."""
        record = record_is(self._context.keys, self._record)
        while requests.turns(latest) < self._done:
            txn = requests.announce(self._keys, self._done, self._seat.job_lease, latest, record)
            result = await self._context.etcd.txn(txn, repeatable=True)
            found = None if result.succeeded else requests.done_in(result)
            if result.succeeded or _revision(found) == _revision(latest):
                return  # if the record was put back: `put_right` follows; else the world is over
            latest = found

    async def _until_announced(self, turn: int, revision: int) -> None:
        """Wait until it is announced that ``turn`` is done, which it was not at ``revision``."""
        etcd = self._context.etcd
        async with puts_after(etcd, self._keys.done, None, revision) as (watch, missed):
            if missed:
                found = (await etcd.get(requests.read_done(self._keys))).kvs
                if requests.turns(found[0] if found else None) >= turn:
                    return
            async for batch in watch:
                if any(requests.turns(event.kv) >= turn for event in batch.events):
                    return
        raise EtcdUnavailableError(f"the connection was closed while this node was in {self._what}")

    # -- what etcd has lost -----------------------------------------------------------------------

    @property
    def is_unsure(self) -> bool:
        """Whether :meth:`put_right` is needed: etcd may not hold what it should, and no call is
        under way that would put it."""
        is_quiet = not self._record or self._lock.locked() or self._sure == self._doubt()
        return not is_quiet and self._is_open()

    async def put_right(self) -> None:
        """Put again what etcd lost of this member's values and announcements. Raises EtcdError."""
        async with self._lock:
            doubt, turn = self._doubt(), self._passed + 1  # a call may begin the next one meanwhile
            with suppress(StateCorruptError):  # a call raises it
                seen = await self._put_all(turn)
                if seen is None:
                    return
                if turn in self._given:  # this may be what the others wait for
                    await self._is_done(turn, seen)
            self._sure = doubt

    async def _put_all(self, turn: int) -> Seen | None:
        """Put the values that etcd lost; return what is there of ``turn``, ``None`` as
        :meth:`_put`.

        One request per value: two may be too large.
        """
        seen = await self._look(turn)
        if not self._is_open():
            return None
        self._record = self._node.control.round_revision
        await self._announce(seen.done)
        there = seen.own if self._sure is not None else seen.own - {turn}  # copies may be under way
        for each in sorted(self._given.keys() - there):
            put = await self._put(each)
            if put is None:
                return None
            seen = put if each == turn else seen
        if turn not in self._given:
            self._may_count |= turn in seen.own or seen.mark is None
            if self._may_count:
                await self._withdraw(turn)
        return seen

    async def _look(self, turn: int, *, names: bool = False) -> Seen:
        """Read what is there of ``turn``; ``names``: also which members gave."""
        txn = requests.look(self._keys, self._seat.rank, turn, names=names)
        seen = requests.seen_in(self._keys, turn, await self._context.etcd.txn(txn))
        self._mark = seen.mark_revision
        return seen

    # -- giving up --------------------------------------------------------------------------------

    async def _give_up(self, turn: int) -> Collection[int] | None:
        """Take back the value given at a barrier, unless all are there; return the ranks that are
        missing.

        ``None``: etcd did not answer, so this member may count as being there until
        :meth:`put_right` succeeds. If the turn is done after all, others may have left, joined
        again or closed the job.
        """
        if self._name is not None:
            self._given.pop(turn, None)
        try:
            return await self._context.clock.wait_for(self._withdraw_locked(turn), _LAST_LOOK_S)
        except (EtcdError, StateCorruptError, TimeoutError):
            self._sure = None
            return None

    async def _withdraw_locked(self, turn: int) -> Collection[int]:
        async with self._lock:
            return await self._withdraw(turn)

    async def _withdraw(self, turn: int) -> Collection[int]:
        """Take this member's value of ``turn`` back if it gives none any more, or announce that the
        turn is done; return the ranks that are missing. Raises EtcdError, StateCorruptError."""
        ranks = frozenset(range(self._seat.size))
        while True:
            seen = await self._look(turn, names=True)
            missing = ranks - seen.ranks - {self._seat.rank}  # it was there until now
            if await self._is_done(turn, seen) or turn in self._given or not self._may_count:
                return missing
            txn = requests.take_back(self._keys, self._seat.rank, turn, self._seat.job_lease, seen)
            result = await self._context.etcd.txn(txn, repeatable=True)
            if result.succeeded:
                self._mark, self._may_count = result.revision, False
                return missing

    async def _timeout(self, limit_s: float, missing: Collection[int] | None) -> Exception:
        size, failed = self._seat.size, "not all gave" if self._name is None else "not passed"
        text = f"{self._what} of round {self._seat.round}: {failed} within {limit_s:g} s"
        if self._done > self._passed:
            text += f": all gave, but {len(self._taken)} of {size} values were read"
            return BarrierTimeoutError(text, missing=())
        if missing is not None:
            with suppress(EtcdError):
                members = await members_of(self._context, self._seat)
                names = [members[rank] for rank in sorted(missing)]
                text += f": {len(names)} of {size} members are missing ({display_names(names)})"
                return BarrierTimeoutError(text, missing=names)
        text += ", and etcd did not say who is missing"
        if self._may_count:
            text += ": until it has heard that this member gave up, it may count as being there"
        return BarrierTimeoutError(text)

    def _broken(self, error: Exception) -> Exception:
        if self._name is None or isinstance(error, WorldClosedError):
            return error
        if isinstance(error, WorldOverError):
            return BarrierBrokenError(str(error), change=error.change)
        return error


def _revision(kv: KeyValue | None) -> int:
    return 0 if kv is None else kv.mod_revision
