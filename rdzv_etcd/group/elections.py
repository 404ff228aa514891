"""Named leadership among the members of one world, on one of them.

Who stands for longest leads; who waits watches the one before it, so that one is told when another
goes. Whether a leadership is held is answered from memory, and a task sees to it that this memory
is right: it watches the member's own key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from rdzv_etcd.arguments import check_name
from rdzv_etcd.core.elections import Fence, base_after, leader_of, next_before, term_of
from rdzv_etcd.core.member import Seat
from rdzv_etcd.core.names import display_name
from rdzv_etcd.core.wait_text import LineTimes
from rdzv_etcd.errors import (
    ElectionTimeoutError,
    EtcdError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    MisuseError,
    StateCorruptError,
    WatchLostError,
)
from rdzv_etcd.etcd.api import Compare, KeyValue
from rdzv_etcd.group.backoff import RETRY_S, Backoff
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.world_over import unless_over_at_once
from rdzv_etcd.schema import office_requests as requests
from rdzv_etcd.schema.keys import OfficeKeys
from rdzv_etcd.text import shown

_LAST_WORD_S = 5.0
"""How long etcd may take to say who leads, when the time is up."""


class Elections:
    """All named leaderships of one world, on one of its members."""

    def __init__(self, node: Node, seat: Seat) -> None:
        self._node = node
        self._seat = seat
        self._offices: dict[str, _Office] = {}

    async def elect(self, name: str, timeout_s: float | None) -> Term:
        """Wait until this member leads under that name.

        Raises ElectionTimeoutError (names who leads), WorldOverError, JobClosedError if the job is
        closed, MisuseError for what is no name, and if this member leads or waits under it already,
        RendezvousFailedError if this node leaves, StateCorruptError, and EtcdError if etcd refuses.
        However it ends before that, cancelled for instance, this member stands no longer.
        """
        check_name("leadership", name)
        office = self._offices.get(name)
        if office is None:
            office = self._offices[name] = _Office(self._node, self._seat, name)
        return await office.elect(timeout_s)

    async def leader(self, name: str) -> str | None:
        """Who leads under that name now, its node id. Raises MisuseError, StateCorruptError and
        EtcdError."""
        check_name("leadership", name)
        return await _leader(self._node, _keys(self._node, self._seat, name))


class Term:
    """One leadership: from the moment at which this member came to lead until it does no longer."""

    def __init__(self, office: _Office, session: int, place: int, fence: Fence) -> None:
        self._office = office
        self._node = office.node
        self.session = session
        self.place = place
        self.fence = fence
        self.has_ended = False

    @property
    def is_held(self) -> bool:
        """Whether this member leads, for all it knows; from memory."""
        return not self.is_over and self._node.context.session.is_sure

    @property
    def is_over(self) -> bool:
        """Whether this member leads no longer, and will not again in this term."""
        is_mine = self._node.context.session.lease_id == self.session
        return self.has_ended or not is_mine or self._office.is_over()

    @property
    def guard(self) -> Compare:
        """Holds as long as this member leads."""
        return self._office.leads(self.place)

    async def lost(self) -> None:
        """Wait until it is over. Raises RendezvousFailedError if this node leaves."""
        context = self._node.context
        while not self.is_over:
            self._node.check_not_gone()
            await context.wakeup.wait(when=lambda: self.is_over or self._node.is_gone)

    async def resign(self) -> None:
        """Cease to lead, at once; the next one does as soon as etcd has heard of it, for which this
        waits for as long as a request may take. If etcd is away, it is told later."""
        self.end()
        await self.told()

    async def told(self) -> None:
        """Wait until etcd has heard that it has ended, for as long as a request may take."""
        await self._office.rested()

    def end(self) -> None:
        """Note that it has ended, and have etcd told."""
        if not self.has_ended:
            self.has_ended = True
            self._office.begin_to_rest()
            self._node.context.wakeup.notify()


class _Office:
    """One name in one world."""

    def __init__(self, node: Node, seat: Seat, name: str) -> None:
        self.node = node
        self._context = node.context
        self._seat = seat
        self._name = name
        self._me = node.context.identity.node_id
        self._keys = _keys(node, seat, name)
        self._what = f"the leadership {shown(name, 80)!r}"
        self._busy = False
        """Whether a call waits, or this member leads."""
        self._puts = 0
        """How often this member's key was put on this session, as far as is known."""
        self._base = 0
        """What terms count from …"""
        self._last_term = 0
        """… and the last one in which this member has led."""
        self._in_doubt = False
        """Whether a request to stand is under way of which nobody knows what becomes."""
        self._resting: asyncio.Task[None] | None = None
        node.attend(self._remember(), f"memory of {name!r:.40}")

    def leads(self, place: int) -> Compare:
        return requests.leads(self._keys, self._me, place)

    async def elect(self, timeout_s: float | None) -> Term:
        if self._busy:
            raise MisuseError(
                f"this member holds {self._what}, or waits for it already: resign it first, or let "
                "one thread wait and share what it gets"
            )
        self._busy = True
        try:
            won = unless_over_at_once(self.node, self._seat, self._what, self._win)
            term = await self._context.clock.wait_for(won, timeout_s)
        except BaseException as error:
            self.begin_to_rest()
            if isinstance(error, TimeoutError):
                raise await self._timeout(timeout_s) from None
            raise
        self.node.attend(self._keep(term), f"leadership {self._name!r:.40}")
        return term

    # -- coming to lead ---------------------------------------------------------------------------

    async def _win(self) -> Term:
        waits_since_s = self._context.clock.now_s()
        telling = asyncio.ensure_future(self._tell(waits_since_s))
        try:
            if self._resting is not None:
                await asyncio.wait({self._resting})
            while True:
                try:
                    term = await self._try()
                    if term is not None:
                        return term
                except (EtcdUnavailableError, LeaseNotFoundError, WatchLostError):
                    # The session or the data are being put back, or etcd is away: this node's own
                    # limit is the caller's.
                    await self._context.clock.sleep(RETRY_S)
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def _try(self) -> Term | None:
        """Stand, and wait for this member's turn; ``None``: things have changed, stand again."""
        context = self._context
        session = context.session.lease_id
        if not session:  # without a lease it would stand for ever
            await context.wakeup.wait(when=lambda: context.session.lease_id != 0)
            return None
        place, kvs = await self._stand(session)
        while place:
            found = requests.candidates(self._keys, kvs)
            before = next_before(found, place)
            if before is None:
                self._last_term = max(term_of(found, place), place + self._base)
                fence = Fence(self._seat.epoch, self._last_term)
                return Term(self, session, place, fence)
            if not await self._gone(before.node_id, before.place, session):
                return None
            kvs = (await context.etcd.get(requests.read(self._keys))).kvs
            mine = requests.own_in(self._keys, self._me, kvs)
            if mine is None or mine.mod_revision != place or mine.lease_id != session:
                return None
        return None

    async def _stand(self, session: int) -> tuple[int, tuple[KeyValue, ...]]:
        """Begin to stand; return this member's place, 0 if it has none, and all candidates."""
        self._in_doubt = True
        try:
            result = await self._context.etcd.txn(
                requests.stand(self._keys, self._me, session, self._puts, self._base),
                repeatable=True,
            )
        except LeaseNotFoundError:
            self._in_doubt = False
            self._context.session.lost(session)
            raise
        self._in_doubt = False
        self._base = base_after(self._base, self._last_term, result.revision)
        kvs = requests.found_in(result)
        mine = requests.own_in(self._keys, self._me, kvs)
        puts, self._puts = self._puts, 0 if mine is None else mine.version
        # It may be refused because it was repeated, and done the first time.
        is_mine = mine is not None and mine.lease_id == session and requests.stands(mine)
        if mine is not None and is_mine and mine.version == puts + 1:
            return mine.mod_revision, kvs
        return 0, kvs

    async def _gone(self, node_id: str, place: int, session: int) -> bool:
        """Wait until that candidate's key is another one; ``False`` if this member has to stand
        again before that."""
        context = self._context
        record = context.control.view.round_revision

        def in_doubt() -> bool:
            # Another session, or a record that was put back: what was there may be gone.
            view = context.control.view
            return context.session.lease_id != session or view.round_revision != record

        watching = asyncio.ensure_future(self._until_changed(node_id, place))
        doubting = asyncio.ensure_future(self._until(in_doubt))
        try:
            await asyncio.wait({watching, doubting}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return watching.done()
        finally:
            for task in (watching, doubting):
                task.cancel()
            await asyncio.wait({watching, doubting})

    async def _until_changed(self, node_id: str, place: int) -> None:
        """Wait until a member's key is not what was put at ``place``. Raises EtcdError."""
        context = self._context
        read = requests.read_one(self._keys, node_id)
        watch = context.etcd.watch(read.key, start_revision=0, tell_resumes=True)
        try:
            await watch.ready()
            batches = aiter(watch)
            while True:
                kvs = (await context.etcd.get(read)).kvs
                if not kvs or kvs[0].mod_revision != place:
                    return
                batch = await anext(batches, None)
                if batch is None:
                    raise EtcdUnavailableError("the connection was closed")
                if batch.events:  # otherwise it goes on after a break: look again
                    return
        finally:
            await watch.close()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._context.wakeup.wait(when=condition)

    # -- leading, and ceasing to ------------------------------------------------------------------

    async def _keep(self, term: Term) -> None:
        """See to it that a leadership that is gone is known to be."""
        watching = asyncio.ensure_future(self._until_lost(term.place))
        ending = asyncio.ensure_future(self._until(lambda: term.is_over))
        try:
            await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            term.end()
            for task in (watching, ending):
                task.cancel()
            await asyncio.wait({watching, ending})

    async def _until_lost(self, place: int) -> None:
        backoff = Backoff(self._context.session.renewal_period_s)
        while True:
            try:
                await self._until_changed(self._me, place)
                return
            except EtcdError as error:  # if etcd is away, the session says so
                await self._context.clock.sleep(backoff.after(error))

    async def _remember(self) -> None:
        """If etcd goes back, tell it what terms count from, and that this member does not stand:
        what it said before may be there again. What it told is on its session; if that goes, tell
        it again."""
        said: tuple[int, int] = (0, 0)

        def is_forgotten() -> bool:
            return self._told() != said

        while not self.is_over():
            said = self._told()
            await self._until(lambda: is_forgotten() or self.is_over())
            if not self._busy:
                self.begin_to_rest()

    def _told(self) -> tuple[int, int]:
        session = self._context.session.lease_id
        return self.node.regressions, session if self._base else 0

    def is_over(self) -> bool:
        """Whether nobody waits for it any more: the world is over, or this node has left."""
        return self.node.is_gone or self.node.change_of(self._seat) is not None

    def begin_to_rest(self) -> None:
        """Stand no longer, and have etcd told: nobody waits for that here."""
        self._busy = False
        if self.node.is_gone or (self._resting is not None and not self._resting.done()):
            return
        self._resting = self.node.attend(self._rest(), f"resigning {self._name!r:.40}")

    async def rested(self) -> None:
        """Wait until etcd has been told, for as long as a request may take."""
        if self._resting is not None:
            limit_s = self._context.settings.connection.request_timeout_s
            with contextlib.suppress(TimeoutError):
                resting = asyncio.shield(self._resting)
                await self._context.clock.wait_for(resting, limit_s)

    async def _rest(self) -> None:
        context = self._context
        backoff = Backoff(context.session.renewal_period_s)
        while not self.is_over():
            session = context.session.lease_id
            if not session:
                await self._until(lambda: context.session.lease_id != 0 or self.is_over())
                continue
            try:
                if await self._has_rested(session):
                    return
            except LeaseNotFoundError:
                context.session.lost(session)
            except EtcdError as error:
                if backoff.is_news(error):
                    context.log.warn(f"cannot tell etcd that it resigns {self._what}: {error}")
                await context.clock.sleep(backoff.after(error))

    async def _has_rested(self, session: int) -> bool:
        """Tell etcd; ``False``: it was not as this member knew it, try again."""
        request = requests.rest(self._keys, self._me, session, self._puts, self._base)
        result = await self._context.etcd.txn(request, repeatable=True)
        if result.succeeded:
            self._puts += 1
            self._in_doubt = False
            return True
        mine = requests.own_in(self._keys, self._me, requests.found_in(result))
        puts, self._puts = self._puts, 0 if mine is None else mine.version
        self._base = base_after(self._base, self._last_term, result.revision)
        if mine is not None and mine.version == puts + 1 and not requests.stands(mine):
            return True  # it was repeated, and done the first time
        stands = mine is not None and requests.stands(mine)
        return not (stands or self._in_doubt or self._base)

    # -- telling ----------------------------------------------------------------------------------

    async def _tell(self, since_s: float) -> None:
        """Say whom this member waits for, if it takes long, and then ever more rarely."""
        clock, lines = self._context.clock, LineTimes()
        while True:
            await clock.sleep(since_s + lines.next_s - clock.now_s())
            waited_s = clock.now_s() - since_s
            lines.note(waited_s)
            try:
                who = _who(await _leader(self.node, self._keys))
            except (EtcdError, StateCorruptError) as error:
                who = f"etcd does not say who leads: {error}"
            self._context.log.warn(f"waiting {waited_s:.0f} s for {self._what}: {who}")

    async def _timeout(self, timeout_s: float | None) -> ElectionTimeoutError:
        text = f"{self._what} of round {self._seat.round}: not had within {timeout_s or 0:g} s"
        try:
            leader = await _leader(self.node, self._keys, _LAST_WORD_S)
        except (EtcdError, StateCorruptError) as error:
            return ElectionTimeoutError(f"{text}, and etcd did not say who leads: {error}")
        return ElectionTimeoutError(f"{text}: {_who(leader)}", leader=leader)


async def _leader(node: Node, keys: OfficeKeys, timeout_s: float | None = None) -> str | None:
    result = await node.context.etcd.get(requests.read(keys), timeout_s=timeout_s)
    leader = leader_of(requests.candidates(keys, result.kvs))
    return None if leader is None else leader.node_id


def _who(leader: str | None) -> str:
    return "nobody leads" if leader is None else f"{display_name(leader)} leads"


def _keys(node: Node, seat: Seat, name: str) -> OfficeKeys:
    return OfficeKeys.of(node.context.keys, seat.round, seat.epoch, name)
