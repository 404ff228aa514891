"""Joining: arrives, waits for the round, gives up with a reason; and logs what it waits for."""

from __future__ import annotations

import asyncio
import math

from rdzv_etcd.errors import (
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdRefusedError,
    EtcdUnavailableError,
    JobClosedError,
    JobSettingsMismatchError,
    JoinTimeoutError,
    OutcomeUnknownError,
    RdzvEtcdError,
)
from rdzv_etcd.etcd.port import TxnResult
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.join_wait import JoinWait
from rdzv_etcd.node.lead import Leadership
from rdzv_etcd.node.leave import (
    closed_error,
    closed_text,
    drained_error,
    why_interrupted,
    withdraw,
)
from rdzv_etcd.node.waiting import RETRY_S
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.describe import is_news, why_drained, world_text
from rdzv_etcd.protocol.member import Member, Phase, Seat
from rdzv_etcd.protocol.model import Closure, Leader, NodeInfo, Round
from rdzv_etcd.protocol.steps import (
    Arrive,
    End,
    Enter,
    JoiningStep,
    Leave,
    MeetEnd,
    Outlast,
    ReadSlice,
    joining_step,
)
from rdzv_etcd.protocol.views import nodes_from, slice_from
from rdzv_etcd.settings import AfterEnd, JobSettings
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown

_HEADWAY_S = 5.0
"""How long before its own join ends a leader closes what can be closed: the write takes time, and
so does another try."""
_EXPIRY_S = 2.0
"""How much later than its TTL a lease of the dead may vanish: etcd looks twice a second."""


class Joining:
    """One join: from the arrival to the formed round."""

    def __init__(
        self, context: NodeContext, member: Member, leadership: Leadership, wait: JoinWait
    ) -> None:
        self._context = context
        self._member = member
        self._leadership = leadership
        self._backoff = context.backoff()
        self._wait = wait
        self._belongs = member.epoch > 0
        """Whether the node was a member, or has arrived in this join: then it is no newcomer."""
        self._conflict_since_s = 0.0

    async def run(self, address: str, port: int, peer_port: int = 0, because: str = "") -> Seat:
        """Arrive and wait; see :meth:`rdzv_etcd.node.node.Node.join` for the errors."""
        context, member = self._context, self._member
        settings = context.settings
        member.begin_join(
            NodeInfo(
                member.node_id,
                address,
                port,
                0,
                settings.job,
                settings.rank_key,
                settings.domain_key,
                data=settings.data,
                peer_port=peer_port,
                round_trip_ms=round(1000 * context.session.round_trip_s),
                because=because,
                lease_ttl_s=context.session.ttl_s,
            )
        )
        try:
            return await self._until_entered()
        except BaseException as error:
            if member.phase is not Phase.GONE:  # leaving ends the session itself, and relies on it
                # Nodes that saw this one waiting do not count on it any more.
                why = self._why_withdrawn(error)
                await asyncio.shield(withdraw(context, member, member.give_up(), why))
            raise

    async def _until_entered(self) -> Seat:
        context, member = self._context, self._member
        while True:
            member.check_not_gone()
            headway_s = min(_HEADWAY_S, self._wait.timeout_s / 10)
            member.closes_by_s = self._wait.deadline_s() - headway_s
            step = joining_step(
                member, context.control.view, context.session.lease_id, context.settings.job
            )
            if isinstance(step, Enter):
                return self._enter()
            try:
                await self._carry_out(step)
            except (EtcdRefusedError, EtcdUnavailableError, OutcomeUnknownError) as error:
                if self._wait.is_over():
                    final = self._final_error(error)
                    if final is error:
                        raise
                    raise final from error
                await self._wait_out(error)

    def _enter(self) -> Seat:
        context, member = self._context, self._member
        before, reason = member.seat, member.reason
        world = member.enter(context.control.view)
        waited_s = context.clock.now_s() - self._wait.began_s
        # Why the workers were restarted, and as what, is logged where torchrun shows it by default.
        context.log.info(
            world_text(world, before, waited_s, reason), warn=is_news(world, before, reason)
        )
        context.wakeup.notify()
        return world

    async def _carry_out(self, step: JoiningStep) -> None:
        """Do what is next, or wait for something to change."""
        context = self._context
        match step:  # for these etcd need not be asked
            case End(closure):
                raise closed_error(context, self._member, closure)
            case Leave(drain):
                raise drained_error(context.settings.job_id, self._member.node_id, drain)
        if context.control.problem is not None:
            await context.control.refresh(self._limit_s())  # it may be over
            if context.control.problem is not None:
                raise context.control.problem.copy()  # the view keeps its own
            return
        if not isinstance(step, Outlast):
            self._wait.note_conflict("")
        match step:
            case MeetEnd(closure, of_another_job):
                self._meet_end(closure, of_another_job=of_another_job)
            case Outlast(theirs, whose):
                await self._outlast(theirs, whose)
            case ReadSlice(record):
                await self._read_slice(record)
            case Arrive():
                if self._wait.trouble is None and self._wait.is_over():
                    raise await self._wait.timeout()
                await self._arrive()
            case _:
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._check_lead()
        self._note_success()  # there is nothing to ask etcd for, whatever it refused
        deadline_s = self._wait.deadline_s()
        until_s = None if deadline_s == math.inf else deadline_s
        if not await self._context.wakeup.wait(until_s) and self._wait.is_over():
            raise await self._wait.timeout()

    def _check_lead(self) -> None:
        """Raise what keeps this node from leading, if the lead is its own.

        A newcomer that got the lead with its arrival, and may not do what a leader does, is like
        one that may not arrive: its role is wrong, and its end frees the lead for a node that may
        do more. If that has worked before, the role may just be edited, and the node waits.
        """
        context, problem = self._context, self._leadership.problem
        if problem is None:
            return
        if isinstance(problem, EtcdPermissionError):
            if self._leadership.is_unfit:
                self._belongs = False
            raise EtcdPermissionError(f"cannot lead the job: {problem}{context.to_grant}")
        raise problem.copy()  # it may be raised again and again

    # -- how long it waits ------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether this join has nothing to wait for any more: the node has left or is drained, or
        its job is closed."""
        member = self._member
        return member.phase is Phase.GONE or member.drain is not None or member.closure is not None

    def _limit_s(self) -> float:
        """How long the next request may take. Raises EtcdUnavailableError if no time is left."""
        remaining_s = self._wait.deadline_s() - self._context.clock.now_s()
        if remaining_s <= 0:
            why = "etcd did not answer" if self._wait.trouble is None else str(self._wait.trouble)
            raise self._unanswered(why)
        return min(remaining_s, self._context.settings.connection.request_timeout_s)

    def _note_success(self) -> None:
        """Note that etcd did what it was asked."""
        if self._wait.trouble is not None:
            self._note_not_arrivable()
        self._wait.note_trouble(None)
        self._backoff.reset()

    def _note_not_arrivable(self) -> None:
        """Note that etcd did not do what this node asked: others could not arrive either."""
        member, now_s = self._member, self._context.clock.now_s()
        member.arrivable_s = max(member.arrivable_s, now_s)

    async def _wait_out(self, error: EtcdError) -> None:
        """Wait a little because of ``error``: etcd is away, or refuses.

        Raises ``error`` if etcd refuses a newcomer: that does no harm, and its launcher should hear
        of it at once. A member that gave up would end a job whose etcd only needs care. Raises an
        error of the same kind when the time is up.
        """
        context = self._context
        now_s = context.clock.now_s()
        self._note_not_arrivable()
        self._wait.note_trouble(error)
        is_first = self._backoff.is_news(error)
        wait_s = self._backoff.after(error)
        if not isinstance(error, EtcdRefusedError):
            context.log.info(f"cannot reach etcd, trying again: {error}")
            await context.clock.sleep(wait_s)
            return
        if not self._belongs:
            raise error
        retry_at_s, deadline_s = now_s + wait_s, self._wait.deadline_s()
        if retry_at_s >= deadline_s:
            raise self._final_error(error) from error
        if is_first:
            context.log.warn(f"waiting up to {deadline_s - now_s:.0f} s for etcd: {error}")
        seen = context.control.view.round_revision
        await context.wakeup.wait(
            retry_at_s,
            when=lambda: self._has_ended() or context.control.view.round_revision != seen,
        )

    def _final_error(self, error: EtcdError) -> EtcdError:
        """What to raise when the time is up, ``error`` being the last one.

        That etcd refused all the time says more than that it did not answer in the end; after the
        node has given up it does not matter whether an unanswered request was done.
        """
        cause = error if isinstance(error, EtcdRefusedError) else self._wait.trouble
        if isinstance(cause, EtcdRefusedError):
            text = cause.detail if isinstance(cause, EtcdNoSpaceError) else str(cause)
            return type(cause)(
                f"the next round was not formed within {self._wait.timeout_s:g} s: {text}"
            )
        return self._unanswered(str(error)) if isinstance(error, OutcomeUnknownError) else error

    def _unanswered(self, why: str) -> EtcdUnavailableError:
        number = self._context.control.view.next_number
        return EtcdUnavailableError(
            f"could not arrive for round {number} within {self._wait.timeout_s:g} s: {why}"
        )

    # -- arriving ---------------------------------------------------------------------------------

    async def _arrive(self) -> None:
        context, member = self._context, self._member
        async with context.presence_lock:
            member.check_not_gone()  # leaving waits for the lock, or has it behind it
            if member.closure is not None:
                return  # the wait for the lock may have outlasted the run
            control = context.control.view
            info = member.plan_arrival(
                control, context.settings.epoch_floor, context.clock.wall_s()
            )
            if info is None:
                return
            limit_s = self._limit_s()
            slice_ = member.slice_to_put_back(control)
            member.forget_arrival()  # an earlier one does not say what is wanted now
            session = await context.session.open(min(limit_s, context.urgent_limit_s))
            txn = requests.arrive(context.keys, info, session, control, slice_)
            result = await context.put_presence(txn, info, session, limit_s)
            if result is None:
                return
            self._note_success()
            if result.succeeded:
                self._belongs = True
                member.note_arrival(session, control)
                if slice_ is not None:
                    member.slice_revision = control.round_revision  # it is there now
                claimed = result.results[1]
                if isinstance(claimed, TxnResult):
                    context.show_leader(Leader(info.node_id, info.settings), claimed)
                context.wakeup.notify()  # if the leader has gone meanwhile, this node may claim
                context.log.info(f"arrived for round {info.arrived_for}, waiting for others")
                return
        if context.control.view.round_revision == control.round_revision:
            await self._look_again()  # what came with the refusal was older than the view

    async def _read_slice(self, record: Round) -> None:
        """Learn this node's rank in a large world: its slice was there before the record was."""
        context, member = self._context, self._member
        revision = context.control.view.round_revision
        if record.slices is None:
            return
        if self._wait.is_over():
            raise JoinTimeoutError(
                f"round {record.number} was formed, but the part of its ranks that names this node "
                f"could not be read within {self._wait.timeout_s:g} s"
            )
        request = requests.read_slice(context.keys, record, record.slices, member.node_id)
        result = await context.etcd.get(request, timeout_s=context.urgent_limit_s)
        found = slice_from(record, member.node_id, result)
        if found is not None:
            member.slice, member.slice_revision = found, revision
            return
        # A later round has deleted it; or data was lost, and no member has put it back (yet).
        await self._look_again()
        if member.unread(context.control.view) == record:
            if record.epoch_fixed is not None:
                await self._arrive()
            else:
                await context.clock.sleep(RETRY_S)

    async def _look_again(self) -> None:
        context = self._context
        await context.control.refresh(context.settings.connection.request_timeout_s)

    def _why_withdrawn(self, error: BaseException) -> str:
        """Why this node no longer waits, as the others are shown."""
        drain = self._member.drain
        if drain is not None:
            return why_drained(drain, self._member.node_id)
        if isinstance(error, RdzvEtcdError):
            return shown(f"gave up its join: {error}", MAX_REASON)
        return why_interrupted(error, "its join")

    # -- another job of this id -------------------------------------------------------------------

    async def _outlast(self, theirs: JobSettings, whose: str) -> None:
        """Wait for a change, because a job of other settings stands in the way.

        A dead job leaves its record until the job lease ends, and its nodes their presences until
        theirs do. A node that is still there after its TTL is alive, so then this raises
        JobSettingsMismatchError; and when the time to join is up. Raises EtcdError as well.
        """
        context = self._context
        control, now_s = context.control.view, context.clock.now_s()
        ttls_s = await self._others_ttls_s()
        lives = control.leader is not None or bool(ttls_s)
        problem = (
            f"this node was started with {context.settings.job}, but {whose} settings are {theirs}"
        )
        if not self._wait.conflict:
            self._conflict_since_s = now_s
        until_s = self._wait.began_s + self._wait.timeout_s
        why = "no node of that job is there: waiting until what it left in etcd expires"
        if lives:
            longest_s = max(context.session.longest_ttl_s, *ttls_s, 0)
            until_s = min(until_s, self._conflict_since_s + longest_s + _EXPIRY_S)
            why = f"waiting up to {until_s - now_s:.0f} s, because its nodes may be dead"
        if now_s >= until_s:
            raise JobSettingsMismatchError(
                f"job {context.settings.job_id!r}: {problem}; start all nodes of a job with the "
                "same --nnodes"
            )
        if not self._wait.conflict:
            context.log.warn(f"{problem}; {why}")
            if lives:
                await context.note_refused()
        self._wait.note_conflict(f"for the job id to become free: {problem}")
        seen = (control.round_revision, control.leader_revision)

        def is_other() -> bool:
            now = context.control.view
            return self._has_ended() or (now.round_revision, now.leader_revision) != seen

        await context.wakeup.wait(until_s, when=is_other)

    async def _others_ttls_s(self) -> list[int]:
        """The TTLs of the leases of others that are there, or may be: 0 where it is not known."""
        keys = self._context.keys
        result = await self._context.etcd.get(keys.nodes.read(limit=2))
        nodes = nodes_from(keys, result, self._context.clock.now_s())
        ttls_s = {keys.node_id(kv.key): 0 for kv in result.kvs}
        ttls_s |= {node_id: one.info.lease_ttl_s for node_id, one in nodes.present.items()}
        return [ttl_s for node_id, ttl_s in ttls_s.items() if node_id != self._member.node_id]

    # -- reasons to stop waiting ------------------------------------------------------------------

    def _meet_end(self, closure: Closure, *, of_another_job: bool) -> None:
        """Do what ``after_end`` says: this node was started after the job was closed, or had no
        part in the run that ended.

        Raises JobClosedError unless it is part of a new run.
        """
        context = self._context
        self._member.met_end = closure
        text = closed_text(context, closure)
        if of_another_job or context.settings.after_end is AfterEnd.NEW_RUN:
            otherwise = "" if of_another_job else " (with after_end=finish it would end instead)"
            context.log.warn(
                f"{text}. This node had no part in that run and begins a new one, for which "
                f"it waits for {context.settings.job}{otherwise}"
            )
            return
        context.log.warn(f"{text}. There is nothing left to do here (after_end=finish)")
        raise JobClosedError(
            f"{text}. This node had no part in that run (after_end=finish, "
            f"for {context.settings.timing.closed_ttl_s} s after its end)",
            closed_by=closure.by,
            reason=closure.reason,
            succeeded=closure.succeeded,
            was_member=False,
        )
