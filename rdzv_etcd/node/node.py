"""One node: composes joining, leading, repair and leaving over one session and one view.

Everything here runs on one event loop; :mod:`rdzv_etcd.world.group` is its blocking face.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.etcd.port import Etcd, GetResult
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.node import leave as leaving
from rdzv_etcd.node import recover
from rdzv_etcd.node.context import Identity, NodeContext, make_context
from rdzv_etcd.node.job_leases import keep_job_leases
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.node.join import Joining
from rdzv_etcd.node.join_wait import JoinWait
from rdzv_etcd.node.lead import Leadership
from rdzv_etcd.node.peers import PeerLinks
from rdzv_etcd.node.waiting import Tasks
from rdzv_etcd.peers import PeerNetwork
from rdzv_etcd.protocol.describe import known_ids
from rdzv_etcd.protocol.member import Member, Phase, Seat
from rdzv_etcd.protocol.model import Closure, Control, Drain
from rdzv_etcd.protocol.views import control_from, control_went_back
from rdzv_etcd.protocol.world_end import (
    cause_of_end,
    is_logged,
    should_yield,
    waiting_count,
    why_over,
)
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import Left, MovedOn, Waiting, WorldChange, text_of

T = TypeVar("T")

_FINISH_TOGETHER_S = 1.0
"""Members usually finish within this time of each other; then that need not be written."""


class Node:
    """One participant of one job; at most one join at a time."""

    def __init__(
        self,
        etcd: Etcd,
        settings: Settings,
        identity: Identity,
        clock: Clock,
        network: PeerNetwork | None = None,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """``network``: over which nodes watch each other, if they do; closed with the node.
        ``recorder``: of this node's metrics."""
        # With in_process this is an agent, which never arrives: the job is that of its workers.
        job = None if settings.in_process else settings.job
        self._member = Member(identity.node_id, settings=job)
        recorder = recorder or Recorder()
        self._context = make_context(
            etcd,
            settings,
            identity,
            clock,
            recorder,
            works=lambda: self._member.phase is Phase.MEMBER,
            build=self._control_from,
            notice=self._notice,
            on_regress=self._went_back,
        )
        self._reported_epoch = 0
        """The world of which this node has logged, or noted, why it is over."""
        self._named_in: tuple[int, ...] = ()
        """The state of the keys from which this node has learned the others' names."""
        self._leadership = Leadership(self._context, self._member)
        self._peers = None if network is None else PeerLinks(self._context, self._member, network)
        self._tasks = Tasks()
        self._duties: list[asyncio.Task[None]] = []
        """The tasks that run until this node leaves; empty: it has not started, or has left."""
        self._watches: weakref.WeakSet[JobWatch] = weakref.WeakSet()
        """Those that are open are kept by their tasks."""

    # -- what others ask ------------------------------------------------------------------------

    @property
    def context(self) -> NodeContext:
        return self._context

    @property
    def phase(self) -> Phase:
        return self._member.phase

    @property
    def epoch(self) -> int:
        """The epoch of the world that this node was in last; 0 before the first."""
        return self._member.epoch

    @property
    def control(self) -> Control:
        return self._context.control.view

    @property
    def leads(self) -> bool:
        """Whether this node holds the lead, as far as it knows."""
        return bool(self._duties) and self._leadership.is_mine

    def waiting_count(self) -> int:
        """Above zero if this node should join again; from memory, never raises or blocks."""
        member = self._member
        if member.failure is not None and not member.is_finishing:
            return 1  # the next join raises it
        if not self._duties:
            return 0
        return waiting_count(member, self.control)

    def closure(self) -> Closure | None:
        """How the job was closed, if it was, as far as this node knows; from memory.

        Before this node takes part it is the last run that counts, as long as its marker stands;
        then the run that this node is in, or waits for.
        """
        member = self._member
        if member.closure is None and member.info is None and self._duties:
            return self.control.closure
        return member.closure

    def change_of(self, seat: Seat) -> WorldChange | None:
        """Why that world is over; ``None`` while it is not. From memory, never raises or blocks.

        It is also over once this node joins again, and once the job is finished.
        """
        return why_over(self._member, self.control, seat.epoch)

    def should_yield(self, seat: Seat) -> bool:
        """Whether a member of that world should leave at the next commit point; from memory."""
        return should_yield(self._member, self.control, seat.epoch)

    @property
    def last_change(self) -> WorldChange | None:
        """Why the world is over that this node was in last and has not left yet, if it is."""
        member = self._member
        if member.phase is not Phase.MEMBER:
            return None
        return why_over(member, self.control, member.epoch)

    @property
    def has_finished(self) -> bool:
        """Whether this member's work is done: see :meth:`finish_work`."""
        return self._member.has_finished

    @property
    def drain(self) -> Drain | None:
        """Why this node is being drained, if it is."""
        return self._member.drain

    @property
    def must_stop(self) -> bool:
        """Whether a join would end at once: the run is over, or this node is being drained."""
        return self._member.closure is not None or self._member.drain is not None

    async def changed(self) -> None:
        """Wait until this node's round is over (see :meth:`waiting_count`).

        Raises RendezvousFailedError if this node leaves, or cannot continue.
        """
        await self._until(lambda: self.waiting_count() or None)

    async def over(self, seat: Seat) -> WorldChange:
        """Wait until that world is over, and return why; raises as :meth:`changed`."""
        return await self._until(lambda: self.change_of(seat))

    async def _until(self, found: Callable[[], T | None]) -> T:
        while True:
            self._member.check_not_gone()
            result = found()
            if result is not None:
                return result
            await self._context.wakeup.wait(when=lambda: self.is_gone or found() is not None)

    async def closed(self) -> Closure:
        """Wait until the job is closed, and return how; raises as :meth:`changed`."""
        while (closure := self.closure()) is None:
            self._member.check_not_gone()
            await self._context.wakeup.wait(when=lambda: self.is_gone or self.closure() is not None)
        return closure

    async def drained(self) -> None:
        """Wait until this node is being drained; raises as :meth:`changed`."""
        await self._until(lambda: self._member.drain)

    # -- taking part ----------------------------------------------------------------------------

    async def start(self, contact_s: float | None = None) -> None:
        """Open the session and begin to watch the job. Idempotent.

        ``contact_s`` bounds the first contact with etcd; without it, it may take as long as any
        request. Raises EtcdError, StateCorruptError.
        """
        if self._duties:
            return
        context = self._context
        timeout_s = context.settings.connection.request_timeout_s
        await context.session.open(timeout_s if contact_s is None else contact_s)
        self._member.note_start(context.session.first_revision)
        began_s = context.clock.now_s()
        await context.control.open(timeout_s)
        context.session.note_round_trip(context.clock.now_s() - began_s)
        member = self._member
        duties = {
            "session": context.session.run(),
            "control": context.control.run(),
            "leadership": self._leadership.run(),
            "presence": recover.watch_own_presence(context, member),
            "repair": recover.work_beside(context, member),
            "job lease": keep_job_leases(context, member),
        }
        self._duties = [self._need(duty, name) for name, duty in duties.items()]
        if self._peers is not None:
            self._duties.append(self.attend(self._peers.run(), "peer links"))

    def _need(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something that this node needs: if it fails, its work would be left undone."""
        return self._tasks.start(work, partial(self.fail, name), self._named(name))

    def _named(self, task: str) -> str:
        return f"rdzv-etcd {task} {self._member.node_id}"

    def fail(self, task: str, error: BaseException) -> None:
        """End this node's part, because a task that it needs has failed."""
        if self._member.failure is not None:
            return  # the first one is the cause
        self._member.failure = (task, error)
        self._context.wakeup.notify()
        self._context.log.fail(f"this node cannot continue: its task {task!r} failed", error)

    @property
    def is_gone(self) -> bool:
        """Whether this node has left, or cannot continue."""
        return self._member.phase is Phase.GONE or self._member.failure is not None

    def attend(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something until it ends or this node leaves; if it fails, that is in the log."""

        def fail(error: BaseException) -> None:
            if self._member.failure is None:
                text = f"this node continues without its task {name!r}, which failed"
                self._context.log.fail(text, error)

        return self._tasks.start(work, fail, self._named(name))

    async def begin_watch(self, watch: JobWatch) -> None:
        """Let a reader of the job's events begin; it ends when this node leaves. Idempotent. Raises
        RendezvousFailedError if it has left, EtcdError, StateCorruptError."""
        if not watch.is_closed:
            self._member.check_not_gone()
            self._watches.add(watch)
            await watch.open(self._context.settings.connection.request_timeout_s)

    async def join(self, address: str, port: int, timeout_s: float, because: str = "") -> Seat:
        """Arrive for the next round and wait until it is formed with this node in it.

        ``timeout_s`` bounds the wait for enough nodes, not the time as a spare of a formed round.
        Raises JoinTimeoutError, JobClosedError, JobSettingsMismatchError, StateCorruptError,
        DrainedError, and EtcdError if etcd cannot be reached for that long.
        """
        self._member.check_not_gone()
        self._check_not_drained()
        await self.start()
        wait = JoinWait(self._context, self._member, timeout_s)
        joining = Joining(self._context, self._member, self._leadership, wait)
        logging_waits = self._need(wait.log(), "wait lines")
        self._record_end()
        recorder, clock = self._context.recorder, self._context.clock
        recorder.join_began(clock.now_s())
        try:
            peer_port = 0 if self._peers is None else self._peers.port
            seat = await joining.run(address, port, peer_port, because)
        except BaseException as error:
            recorder.join_failed(type(error).__name__)
            raise
        finally:
            logging_waits.cancel()
        recorder.joined(seat.round, seat.epoch, seat.size, clock.now_s())
        if self._peers is not None:
            accuser = self._peers.accuser
            accuser.note_world()
            if accuser.has_made_any:
                self.attend(accuser.withdraw(), "withdrawing accusations")
        return seat

    def _record_end(self) -> None:
        """Record why the world that this node works in is over, at the latest when it goes."""
        if self._member.phase is Phase.MEMBER:
            cause = cause_of_end(self.last_change or MovedOn())
            self._context.recorder.world_over(cause, self._context.clock.now_s())

    def _check_not_drained(self) -> None:
        """Raise DrainedError if this node is being drained; a run that is over ends it
        differently."""
        member = self._member
        if member.drain is not None and member.closure is None:
            raise leaving.drained_error(self._context.settings.job_id, member.node_id, member.drain)

    async def finish_work(self, seat: Seat) -> None:
        """Note that this member's work in that world is done, though perhaps not the others'; from
        now on they do not wait for it. Returns at once."""
        self.attend(self._note_finished(seat), "finished")

    async def _note_finished(self, seat: Seat) -> None:
        await self._context.clock.sleep(_FINISH_TOGETHER_S)
        member = self._member
        if member.works_in(seat.epoch) and member.closure is None:
            member.finish()
            self._context.wakeup.notify()  # the repair puts its presence again

    async def be_drained(self, reason: str) -> None:
        """Leave at the next safe point; a join that waits ends at once. Idempotent."""
        member = self._member
        member.be_drained(Drain(member.node_id, shown(reason, MAX_REASON)))
        self._context.wakeup.notify()

    async def give_up_seat(self, joined_after: int, reason: str) -> None:
        """Leave the world of an epoch after ``joined_after``, if this node has become a member of
        one: the caller of that join was interrupted, and will not work in it. The others learn of
        it at once. The node may join again meanwhile."""
        member = self._member
        if member.phase is Phase.MEMBER and member.epoch > joined_after:
            await self._give_up(reason)

    async def leave_world(self, seat: Seat, reason: str) -> None:
        """Leave that world, unless it is over: a call in it was interrupted, and its caller does
        not know its outcome. The others learn of it at once. The node may join again meanwhile."""
        if self.change_of(seat) is None:
            await self._give_up(reason)

    async def _give_up(self, reason: str) -> None:
        context, member = self._context, self._member
        self._record_end()
        info = member.give_up(reason)
        context.wakeup.notify()
        await leaving.withdraw(context, member, info, reason)

    # -- what the watch on the control keys shows -------------------------------------------------

    def _notice(self, view: Control) -> None:
        """Take note of a new view of the control keys: the job's state has changed."""
        context, member = self._context, self._member
        now_s = context.clock.now_s()
        member.notice(view, now_s)
        revisions = (view.round_revision, view.change_revision, view.leader_revision)
        named = (*revisions, view.refused_lease)
        if named != self._named_in:  # not at each of the events of a round
            self._named_in = named
            context.log.names.learn(known_ids(view))
        ttls_s = None if view.formed is None else view.formed.lease_ttls_s
        if ttls_s is not None:
            context.session.note_ttls(ttls_s.shortest, ttls_s.longest)
        why = why_over(member, view, member.epoch)
        if why is None:
            return
        if not isinstance(why, MovedOn):
            context.recorder.world_over(cause_of_end(why), now_s)
        if member.epoch != self._reported_epoch and is_logged(member, why):
            self._reported_epoch = member.epoch
            if isinstance(why, Left | Waiting):  # logged with the next world, if there is one
                member.reason = text_of(why, context.log.names)
            else:
                context.log.warn(text_of(why, context.log.names))

    def _control_from(self, result: GetResult) -> Control:
        context = self._context
        view, before = control_from(context.keys, result), context.control.seen
        if before is not None and control_went_back(before, view):
            self._went_back()
        return view

    def _went_back(self) -> None:
        """Note that etcd has lost data."""
        self._member.note_regress()
        self._context.session.note_instability()

    # -- the end --------------------------------------------------------------------------------

    async def close_job(self, *, succeeded: bool, reason: str, anyones: bool = False) -> None:
        """Put the closed marker, for ``closed_ttl_s``. Raises EtcdError, StateCorruptError.

        Does nothing if the job is closed already, if no round was formed, or, unless ``anyones``,
        if this node is no member of the formed one.
        """
        reason = shown(reason, MAX_REASON)
        await leaving.close_job(
            self._context, self._member, succeeded=succeeded, reason=reason, anyones=anyones
        )

    async def leave(self, reason: str) -> None:
        """Say goodbye, end the session, clear up if this was the last node. Idempotent.

        Bounded by ``close_timeout_s`` and by the lease's TTL: after that etcd has done it.
        """
        context, member = self._context, self._member
        if member.phase is Phase.GONE:
            return
        self._record_end()
        member.phase = Phase.GONE
        context.recorder.left(context.clock.now_s())
        context.wakeup.notify()  # other threads' calls that wait end now
        try:
            if self._duties:
                goodbye = self._say_goodbye(shown(reason, MAX_REASON))
                await context.clock.wait_for(goodbye, context.leaving_limit_s)
            else:  # it never started; a lease may be there all the same
                await context.session.end(context.leaving_limit_s)
        except (RdzvEtcdError, TimeoutError) as error:
            context.log.info(f"left without etcd's confirmation: {error}")
        finally:
            for watch in tuple(self._watches):
                await watch.close()
            if self._peers is not None:
                await self._peers.close()
            self._duties = []
            await self._tasks.stop()
            await self._leadership.closer.drop_leases()  # leading may have been cut off in it

    async def _say_goodbye(self, reason: str) -> None:
        context, member = self._context, self._member
        await leaving.say_goodbye(context, member, member.info, reason)
        await leaving.remove_job(self._context, self._member)
