"""Joining: arrives, waits for the round, gives up with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

from rdzv_etcd.errors import (
    EtcdError,
    EtcdPermissionError,
    EtcdRefusedError,
    EtcdUnavailableError,
    JobClosedError,
    JoinTimeoutError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    RdzvEtcdError,
    StateCorruptError,
)
from rdzv_etcd.etcd.port import TxnResult
from rdzv_etcd.node.backoff import RETRY_S
from rdzv_etcd.node.conflict import Conflict
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.draining import drained_error
from rdzv_etcd.node.join_limits import JoinLimits
from rdzv_etcd.node.lead import Leadership
from rdzv_etcd.node.leave import say_goodbye, why_interrupted
from rdzv_etcd.node.pages import read_pages, within
from rdzv_etcd.node.slices import members_in
from rdzv_etcd.node.wait_lines import WaitLines
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.draining import why_drained
from rdzv_etcd.protocol.member import Member, Phase, Seat
from rdzv_etcd.protocol.model import Closure, Leader, NodeInfo, Round
from rdzv_etcd.protocol.names import display_name
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
from rdzv_etcd.protocol.wait_text import is_news, tell_arrived, tell_world
from rdzv_etcd.settings import AfterEnd
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown


class Joining:
    """One join: from the arrival to the formed round."""

    def __init__(
        self, context: NodeContext, member: Member, leadership: Leadership, timeout_s: float
    ) -> None:
        self._context = context
        self._member = member
        self._leadership = leadership
        self._limits = JoinLimits(context, member, timeout_s)
        self._conflict = Conflict(context, self._limits)

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
            await self._withdraw(self._why_withdrawn(error))
            raise

    async def tell(self) -> None:
        """Tell what :meth:`run` waits for, beside it, until cancelled."""
        await WaitLines(self._context, self._member, self._limits).run()

    async def _until_entered(self) -> Seat:
        context, member, limits = self._context, self._member, self._limits
        while True:
            member.check_not_gone()
            limits.plan_to_close()
            step = self._step()
            if isinstance(step, Enter):
                return self._enter()
            try:
                await self._carry_out(step)
            except (EtcdRefusedError, EtcdUnavailableError, OutcomeUnknownError) as error:
                if context.clock.now_s() >= limits.deadline_s():
                    last = limits.last_word(error)
                    if last is error:
                        raise
                    raise last from error
                await limits.sit_out(error)

    def _step(self) -> JoiningStep:
        context = self._context
        return joining_step(
            self._member, context.control.view, context.session.lease_id, context.settings.job
        )

    def _enter(self) -> Seat:
        context, member = self._context, self._member
        before, reason = member.seat, member.reason
        world = member.enter(context.control.view)
        waited_s = context.clock.now_s() - self._limits.began_s
        # Why the workers were restarted, and as what, is told where torchrun tells it by default.
        context.log.say(
            tell_world(world, before, waited_s, reason), warn=is_news(world, before, reason)
        )
        context.wakeup.notify()
        return world

    async def _carry_out(self, step: JoiningStep) -> None:
        """Do what is next, or wait for something to change."""
        context, limits = self._context, self._limits
        match step:  # of which etcd need not be asked
            case End(closure):
                raise self._closed_error(closure)
            case Leave(drain):
                raise drained_error(context.settings.job_id, self._member.node_id, drain)
        if context.control.problem is not None:
            await context.control.refresh(limits.limit_s())  # it may be over
            if context.control.problem is not None:
                raise context.control.problem
            return
        if not isinstance(step, Outlast):
            limits.note_conflict("")
        match step:
            case MeetEnd(closure):
                self._meet_end(closure)
            case Outlast(theirs, whose):
                await self._conflict.outlast(theirs, whose)
            case ReadSlice(record):
                await self._read_slice(record)
            case Arrive():
                if limits.trouble is None and self._is_over():
                    raise await self._timeout()
                await self._arrive()
            case _:
                await self._wait()

    async def _wait(self) -> None:
        context, limits = self._context, self._limits
        self._check_lead()
        limits.relieved()  # there is nothing to ask etcd for, whatever it refused
        deadline_s = limits.deadline_s()
        until_s = None if deadline_s == math.inf else deadline_s
        if not await context.wakeup.wait(until_s) and self._is_over():
            raise await self._timeout()

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
                self._limits.note_unfit()
            raise EtcdPermissionError(f"cannot lead the job: {problem}{context.to_grant}")
        raise problem.copy()  # it may be raised again and again

    def _is_over(self) -> bool:
        return self._context.clock.now_s() >= self._limits.deadline_s()

    # -- arriving -------------------------------------------------------------------------------

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
            limit_s = self._limits.limit_s()
            slice_ = member.slice_to_put_back(control)
            member.forget_arrival()  # whatever an earlier one said is not what is wanted now
            try:
                session = await context.session.open(min(limit_s, context.urgent_limit_s))
                result = await context.etcd.txn(
                    requests.arrive(
                        context.keys,
                        info,
                        session,
                        control.round_revision,
                        requests.put_slice(context.keys, control.formed, slice_),
                    ),
                    timeout_s=limit_s,
                    repeatable=True,
                )
            except LeaseNotFoundError:
                context.session.lost(context.session.lease_id)
                return
            self._limits.relieved()
            if result.succeeded:
                self._limits.note_arrival()
                member.note_arrival(session, control)
                if slice_ is not None:
                    member.note_slice_there(control)
                claimed = result.results[1]
                if isinstance(claimed, TxnResult):
                    self._leadership.note(Leader(info.node_id, info.settings), claimed)
                context.wakeup.notify()  # if the leader has gone meanwhile, this node may claim
                context.log.say(f"arrived for round {info.arrived_for}, waiting for others")
                return
        context.take_control(result)
        if context.control.view.round_revision == control.round_revision:
            await self._look_again()  # what came with the refusal was older than the view

    async def _read_slice(self, record: Round) -> None:
        """Learn this node's rank in a large world: its slice was there before the record was."""
        context, member = self._context, self._member
        revision = context.control.view.round_revision
        if record.slices is None:
            return
        if self._is_over():
            raise JoinTimeoutError(
                f"round {record.number} was formed, but the part of its ranks that names this node "
                f"could not be read within {self._limits.timeout_s:g} s"
            )
        request = requests.read_slice(context.keys, record, record.slices, member.node_id)
        result = await context.etcd.get(request, timeout_s=context.urgent_limit_s)
        found = slice_from(record, member.node_id, result)
        if found is not None:
            member.note_slice(found, revision)
            return
        # A later round has swept it away; or data was lost, and no member has put it back (yet).
        await self._look_again()
        if member.unread(context.control.view) == record:
            if record.epoch_fixed is not None:
                await self._arrive()
            else:
                await context.clock.sleep(RETRY_S)

    async def _look_again(self) -> None:
        context = self._context
        await context.control.refresh(context.settings.connection.request_timeout_s)

    async def _withdraw(self, reason: str) -> None:
        """Take the presence back: whoever saw this node waiting does not count on it any more."""
        member = self._member
        if member.phase is Phase.GONE:
            return  # leaving ends the session itself, and what follows relies on that
        await asyncio.shield(self._say_goodbye(member.give_up(), reason))

    async def _say_goodbye(self, info: NodeInfo | None, reason: str) -> None:
        with contextlib.suppress(EtcdError):  # then the lease runs out
            await say_goodbye(self._context, self._member, self._leadership, info, reason)

    def _why_withdrawn(self, error: BaseException) -> str:
        """Say to the others why this node does not wait any more."""
        drain = self._member.drain
        if drain is not None:
            return why_drained(drain, self._member.node_id)
        if isinstance(error, RdzvEtcdError):
            return shown(f"gave up its join: {error}", MAX_REASON)
        return why_interrupted(error, "its join")

    # -- reasons to stop waiting ----------------------------------------------------------------

    def _meet_end(self, closure: Closure) -> None:
        """Do what ``after_end`` says: this node was started after the job was closed, or had no
        part in the run that ended.

        Raises JobClosedError unless it is part of a new run.
        """
        context = self._context
        self._member.meet_end(closure)
        after_end, text = context.settings.after_end, self._closed_text(closure)
        if after_end is AfterEnd.NEW_RUN:
            context.log.warn(
                f"{text}. This node had no part in that run and begins a new one, for which "
                f"it waits for {context.settings.job} (with after_end=refuse or "
                "after_end=finish it would end instead)"
            )
            return
        if after_end is AfterEnd.FINISH:
            context.log.warn(f"{text}. There is nothing left to do here (after_end=finish)")
        raise JobClosedError(
            f"{text}. This node had no part in that run (after_end={after_end.value}, "
            f"closed_ttl={context.settings.timing.closed_ttl_s})",
            closed_by=closure.by,
            reason=closure.reason,
            succeeded=closure.succeeded,
            was_member=False,
            is_refused=after_end is AfterEnd.REFUSE,
        )

    def _closed_error(self, closure: Closure) -> JobClosedError:
        return JobClosedError(
            self._closed_text(closure),
            closed_by=closure.by,
            reason=closure.reason,
            succeeded=closure.succeeded,
            was_member=self._member.was_member,
        )

    def _closed_text(self, closure: Closure) -> str:
        ago_s = max(0.0, self._context.clock.wall_s() - closure.wall_s)
        return (
            f"job {self._context.settings.job_id!r} was closed by {display_name(closure.by)}, "
            f"{ago_s:.0f} s ago: {shown(closure.reason)}"
        )

    async def _timeout(self) -> JoinTimeoutError:
        context = self._context
        control = context.control.view
        formed = control.formed
        text = f"round {control.next_number} was not formed within {self._limits.timeout_s:g} s: "
        try:
            if formed is not None:  # who is still at work there has not arrived
                members = await members_in(context, formed)
                control = replace(control, round=replace(formed, members=members))
            limit_s = within(context.clock, 5.0)
            result = await read_pages(context.etcd, context.keys.nodes, limit_s=limit_s)
        except EtcdPermissionError as error:
            return JoinTimeoutError(f"{text}who is there is not known: {error}{context.to_grant}")
        except (EtcdRefusedError, StateCorruptError) as error:
            return JoinTimeoutError(f"{text}who is there is not known: {error}")
        except RdzvEtcdError as error:
            return JoinTimeoutError(f"{text}etcd does not answer ({error})")
        nodes = nodes_from(context.keys, result, context.clock.now_s())
        arrived, told = tell_arrived(control, nodes, context.settings.job)
        text += told
        earlier = self._member.met_end
        if earlier is not None:
            text += f". {self._closed_text(earlier)}"
        return JoinTimeoutError(text, arrived=arrived)
