"""Named barriers among the members of a round. Drives etcd's port; knows no torch.

What it writes is in :mod:`rdzv_etcd.schema.barrier_requests`.

A name may be used again and again: each use is a *turn*. Every member counts for itself how often
it has passed, and they agree, because nobody passes a turn that not all have reached: the turn is
decided by one transaction that arrives and counts, and a member that gives up, for whatever
reason, takes its arrival back in one that counts as well. The last to arrive says so in one key
that the others watch: N notifications, not N².

A member that has passed, and whose caller was interrupted before it could be told, owes it that:
its next call with that name returns at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rdzv_etcd.arguments import check_name, seconds
from rdzv_etcd.clock import abandon
from rdzv_etcd.core.member import Seat
from rdzv_etcd.core.names import display_names
from rdzv_etcd.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    EtcdError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    MisuseError,
    RevisionRegressedError,
    StateCorruptError,
    WatchLostError,
    WorldClosedError,
    WorldOverError,
)
from rdzv_etcd.etcd.after_read import puts_after
from rdzv_etcd.etcd.api import Compare, KeyValue, TxnResult
from rdzv_etcd.group.after_losses import after_losses
from rdzv_etcd.group.backoff import RETRY_S
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.roster import members_of
from rdzv_etcd.group.world_over import first_of, until_over
from rdzv_etcd.schema import barrier_requests as requests
from rdzv_etcd.schema.keys import BarrierKeys
from rdzv_etcd.schema.requests import record_is

_LAST_WORD_S = 5.0
"""How long etcd may take to say who is missing, or that all are there after all."""
_REMEMBERED = 8
"""Barriers passed last. In one thread only the very last can be one at which others still wait."""


class Barriers:
    """All barriers of one round, on one of its members."""

    def __init__(self, node: Node, seat: Seat) -> None:
        self._node = node
        self._seat = seat
        self._barriers: dict[str, Barrier] = {}
        self._last_passed: dict[Barrier, None] = {}
        """In that order: others may not have heard of it yet."""
        self._keeping: asyncio.Task[None] | None = None

    async def wait(self, name: str, timeout_s: float) -> None:
        """Wait until every member has called this with the same name, as often as this one.

        Raises BarrierTimeoutError (names who is missing; to call it again is to try again),
        BarrierBrokenError if the round changes meanwhile, JobClosedError if the job is closed,
        MisuseError for what is no name or time limit, and while another call with this name is
        under way, RendezvousFailedError if this node leaves, and EtcdError. However it ends before
        all are there, cancelled for instance, this member does not count as being there.
        """
        await self.named(name).wait(timeout_s, [])

    def named(self, name: str) -> Barrier:
        """Return the barrier of that name. From any thread; raises MisuseError for what is no
        name."""
        check_name("barrier", name)
        barrier = self._barriers.get(name)
        if barrier is None:
            made = Barrier(self._node, self._seat, name, self._note_passed)
            barrier = self._barriers.setdefault(name, made)
        return barrier

    def _note_passed(self, barrier: Barrier) -> None:
        self._last_passed.pop(barrier, None)
        self._last_passed[barrier] = None
        if len(self._last_passed) > _REMEMBERED:
            del self._last_passed[next(iter(self._last_passed))]
        if self._keeping is None:
            keep = after_losses(self._node, self._seat, self._say_again)
            self._keeping = self._node.attend(keep, "barriers")

    async def _say_again(self, record: int) -> bool:
        guard = record_is(self._node.context.keys, record)
        return all([await barrier.say_again(guard) for barrier in tuple(self._last_passed)])


class Barrier:
    """One name in one round."""

    def __init__(
        self, node: Node, seat: Seat, name: str, note_passed: Callable[[Barrier], None]
    ) -> None:
        self._node = node
        self._note_passed = note_passed
        self._context = node.context
        self._seat = seat
        self._name = name
        self._what = f"barrier {name!r}"
        self._passed = 0
        """How often this member has passed."""
        self._untold: list[list[int]] = []
        """The turns that calls have passed which did not return."""
        self._waiting: list[int] | None = None
        """What the call that waits notes its turns in."""
        self._arriving: asyncio.Future[TxnResult] | None = None
        """The arrival that is under way: it outlasts its call, so that nothing overtakes it."""
        self._giving_up: asyncio.Future[None] | None = None
        """Takes the arrival of the last call back; it may outlast that call."""
        self._keys = BarrierKeys.of(self._context.keys, seat.round, seat.epoch, name)

    def not_told(self, passed: list[int]) -> None:
        """Note that a call does not return; thread-safe."""
        self._untold.append(passed)

    async def wait(self, timeout_s: float, passed: list[int]) -> None:
        """See :meth:`Barriers.wait`; the turn is noted in ``passed`` as soon as that is decided,
        and may be so yet after a call that is cancelled."""
        limit_s = seconds(timeout_s)
        if self._waiting is not None:
            raise MisuseError(
                f"this member waits at {self._what} already: a member is there once, so let one "
                "thread call it, or give each thread a barrier with a name of its own"
            )
        self._waiting = passed
        try:
            await self._wait(limit_s, passed)
        finally:
            self._wait_no_more(passed)

    def _wait_no_more(self, passed: list[int]) -> None:
        if self._waiting is passed:
            self._waiting = None

    async def _wait(self, timeout_s: float, passed: list[int]) -> None:
        clock = self._context.clock
        until_s = clock.now_s() + timeout_s
        if self._giving_up is not None:
            await asyncio.wait({self._giving_up})
        if self._was_passed(passed):
            return
        if self._node.change_of(self._seat) is not None:
            raise _broken(await until_over(self._node, self._seat, self._what))
        turn = self._passed + 1
        try:
            await clock.wait_for(self._pass_unless_over(turn), max(0.0, until_s - clock.now_s()))
            self._pass_turn(turn, passed)
        except BaseException as error:
            self._giving_up = asyncio.ensure_future(self._give_up(turn, passed))
            self._wait_no_more(passed)  # its caller may call again before etcd has answered
            await asyncio.shield(self._giving_up)
            if self._passed < turn and isinstance(error, TimeoutError):
                raise await self._timeout(turn, timeout_s) from None
            if self._passed < turn or not isinstance(error, Exception):
                raise

    def _pass_turn(self, turn: int, passed: list[int]) -> None:
        self._passed = turn
        passed.append(turn)
        self._note_passed(self)

    def _was_passed(self, passed: list[int]) -> bool:
        """Whether an earlier call has passed without its caller being told: this one tells it."""
        while self._untold:
            passed += self._untold.pop()
        return bool(passed)

    async def _pass_unless_over(self, turn: int) -> None:
        """Pass, or raise that the world is over."""
        over = asyncio.ensure_future(until_over(self._node, self._seat, self._what))
        passing = asyncio.ensure_future(self._pass(turn))
        try:
            await first_of(self._node, self._what, passing, over)
            if not passing.done():
                raise _broken(over.result())
            passing.result()
        finally:
            passing.cancel()
            over.cancel()
            await asyncio.wait({passing, over})

    # -- arriving ---------------------------------------------------------------------------------

    async def _pass(self, turn: int) -> None:
        """Arrive, and again whenever the arrival may be gone, until all have arrived."""
        while True:
            try:
                if await self._arrive(turn):
                    return
            except (EtcdUnavailableError, LeaseNotFoundError, WatchLostError):
                # The session, the job's lease or the data are being put back; or etcd is away, and
                # with it nobody's arrival is lost: this node's own limit is the caller's.
                await self._context.clock.sleep(RETRY_S)

    async def _arrive(self, turn: int) -> bool:
        """Arrive; tell whether the turn was passed. ``False``: arrive again."""
        context, seat = self._context, self._seat
        session = context.session.lease_id
        if not session:  # without a lease the arrival would outlive its node
            await context.wakeup.wait(when=lambda: context.session.lease_id != 0)
            return False
        record, breaks = context.control.view.round_revision, context.control.breaks
        try:
            txn = requests.arrive(self._keys, turn, context.identity.node_id, session)
            self._arriving = asyncio.ensure_future(context.etcd.txn(txn, repeatable=True))
            result = await asyncio.shield(self._arriving)
        except LeaseNotFoundError:
            context.session.lost(session)
            return False
        here, done = requests.answers(result)
        if requests.turns(done) < turn - 1:
            await self._announce(turn - 1, done)  # data were lost; others may wait for it
        if requests.turns(done) >= turn:
            return True
        if here >= seat.size:
            await self._announce(turn, done)
            return True

        def in_doubt() -> bool:
            # Another session, a record that was put back, or an etcd that may be an older one:
            # what was there may be gone.
            control = context.control
            return (
                context.session.lease_id != session
                or control.view.round_revision != record
                or control.breaks != breaks
            )

        return await self._told_unless(turn, result.revision, in_doubt)

    async def _told_unless(self, turn: int, revision: int, in_doubt: Callable[[], bool]) -> bool:
        told = asyncio.ensure_future(self._told(turn, revision))
        doubted = asyncio.ensure_future(self._until(in_doubt))
        try:
            await asyncio.wait({told, doubted}, return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                told.result()
                return True
            return False
        finally:
            told.cancel()
            doubted.cancel()
            await asyncio.wait({told, doubted})

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._context.wakeup.wait(when=condition)

    async def _told(self, turn: int, revision: int) -> None:
        """Return when all have been there ``turn`` times, which was not so at ``revision``."""
        etcd = self._context.etcd
        async with puts_after(etcd, self._keys.done, None, revision) as (watch, missed):
            if missed:
                found = await etcd.get(requests.read_done(self._keys))
                if found.revision < revision:  # the arrivals are gone
                    raise RevisionRegressedError(revision, found.revision)
                if requests.turns(found.kvs[0] if found.kvs else None) >= turn:
                    return
            async for batch in watch:
                if any(requests.turns(event.kv) >= turn for event in batch.events):
                    return
        raise EtcdUnavailableError("the connection was closed while this node waited at a barrier")

    async def _announce(
        self, turn: int, done: KeyValue | None, timeout_s: float | None = None
    ) -> None:
        """Say that all have been there ``turn`` times; ``done`` is what was said last."""
        while requests.turns(done) < turn:
            txn = requests.announce(self._keys, turn, self._seat.job_lease, done)
            result = await self._context.etcd.txn(txn, timeout_s=timeout_s, repeatable=True)
            if result.succeeded:
                return
            done = requests.done_in(result)

    async def say_again(self, guard: Compare) -> bool:
        """Say once more how often all have been there if etcd has forgotten it and the guard holds;
        tell whether that is said now. Raises EtcdError."""
        etcd = self._context.etcd
        found = (await etcd.get(requests.read_done(self._keys))).kvs
        done, turn = (found[0] if found else None), self._passed
        try:
            if requests.turns(done) >= turn:
                return True
        except StateCorruptError:  # whoever calls is told
            return True
        txn = requests.announce(self._keys, turn, self._seat.job_lease, done, (guard,))
        return (await etcd.txn(txn, repeatable=True)).succeeded

    # -- giving up --------------------------------------------------------------------------------

    async def _give_up(self, turn: int, passed: list[int]) -> None:
        """Take the arrival back, so that nobody counts on it; or pass, if all are there anyway.

        Others may have passed already and gone on: to leave, to join again, to close the job.
        """
        if self._arriving is not None:
            await asyncio.wait({self._arriving}, timeout=_LAST_WORD_S / 2)
            await abandon(self._arriving)
        txn = requests.take_back(self._keys, turn, self._context.identity.node_id)
        with contextlib.suppress(EtcdError):  # it goes with the session, or is there at the retry
            result = await self._context.etcd.txn(txn, timeout_s=_LAST_WORD_S)
            here, done = requests.answers(result)
            if here >= self._seat.size:
                await self._announce(turn, done, _LAST_WORD_S)
                self._pass_turn(turn, passed)
            elif requests.turns(done) >= turn:
                self._pass_turn(turn, passed)

    async def _timeout(self, turn: int, timeout_s: float) -> BarrierTimeoutError:
        seat = self._seat
        text = f"barrier {self._name!r} of round {seat.round}: not passed within {timeout_s:g} s"
        try:
            missing = await self._missing(turn)
        except EtcdError as error:
            return BarrierTimeoutError(f"{text}, and etcd did not say who is missing: {error}")
        return BarrierTimeoutError(
            f"{text}: {len(missing)} of {seat.size} members are missing ({display_names(missing)})",
            missing=missing,
        )

    async def _missing(self, turn: int) -> list[str]:
        read = requests.read_arrivals(self._keys, turn)
        result = await self._context.etcd.get(read, timeout_s=_LAST_WORD_S)
        here = {self._keys.node_id(turn, kv.key) for kv in result.kvs}
        here.add(self._context.identity.node_id)  # it was there until now
        members = await members_of(self._context, self._seat)
        return [member for member in members if member not in here]


def _broken(error: Exception) -> Exception:
    if isinstance(error, WorldOverError) and not isinstance(error, WorldClosedError):
        return BarrierBrokenError(str(error), change=error.change)
    return error
