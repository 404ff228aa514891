"""The leader's work: claims a vacant lead, has rounds closed, publishes changes.

Every write is fenced by the lead, so a leader that does not know yet that it was replaced can do no
harm. :mod:`rdzv_etcd.protocol.lead` decides.
"""

from __future__ import annotations

import contextlib

from rdzv_etcd.clock import beside
from rdzv_etcd.errors import (
    EtcdError,
    EtcdRefusedError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    RdzvEtcdError,
    StateCorruptError,
)
from rdzv_etcd.etcd.port import GetResult
from rdzv_etcd.node.close_round import RoundCloser
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.slices import Roster
from rdzv_etcd.node.views import ViewWatch
from rdzv_etcd.node.waiting import RETRY_S
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.describe import text_of_change
from rdzv_etcd.protocol.lead import Times, is_unfit_to_lead, leader_step
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Control, Leader, Nodes
from rdzv_etcd.protocol.steps import LeadStep, claim_delay_s, holds_lead, lead_step
from rdzv_etcd.protocol.views import nodes_after, nodes_from, nodes_went_back
from rdzv_etcd.protocol.world_end import losses
from rdzv_etcd.world_change import cause_of_loss

_MOST_REPORTED = 8
"""More unreadable keys than this are one mistake, or one attack: they are only counted."""
_PAUSES = 3
"""While thousands arrive, deciding at each arrival would take all the time: after a decision the
leader pauses for this many times as long as that took."""
_LONGEST_PAUSE_S = 1.0
"""It pauses no longer than this: it may have been stopped during the decision."""


class Leadership:
    """Leads while this node holds the leader key, and claims it when it is vacant."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self._roster = Roster(context)
        self._backoff = context.backoff()
        self.closer = RoundCloser(context, member, self._roster)
        self._unreadable: set[str] = set()
        """The keys among the presences that this node has reported as unreadable."""
        self._problem: RdzvEtcdError | None = None
        """See :attr:`problem`. Only a lead that works clears it: that something else can be read
        says nothing about what a leader needs."""
        self._problem_since_s = 0.0
        self._has_claimed = False
        """Whether this node has had a lead that did not come with its arrival."""
        self._has_read = False
        """Whether this node has read the presences as a leader."""
        self.is_unfit = False
        """Whether :attr:`problem` is there to stay: see :func:`is_unfit_to_lead`."""

    @property
    def problem(self) -> RdzvEtcdError | None:
        """What keeps this node from leading while it holds the lead, as no other node can then."""
        return self._problem if self.is_mine else None

    @property
    def is_mine(self) -> bool:
        """Whether the leader key is this node's and its session lives."""
        context = self._context
        return holds_lead(self._member, context.control.view, context.session.lease_id)

    def _lead_step(self) -> LeadStep:
        context = self._context
        return lead_step(self._member, context.control.view, context.session.lease_id)

    async def run(self) -> None:
        """Claim and lead until cancelled."""
        context = self._context
        while True:
            step = self._possible()
            try:
                if step is LeadStep.LEAVE:
                    self._problem = None
                    await context.wakeup.wait(when=lambda: self._possible() is not LeadStep.LEAVE)
                elif step is LeadStep.LEAD:
                    await self._lead(context.control.view.leader_revision)
                elif step is LeadStep.RESIGN:
                    await self._resign(context.control.view)
                else:
                    await self._claim()
            except EtcdError as error:
                what = "resign the lead" if step is LeadStep.RESIGN else "claim the vacant lead"
                await context.back_off(self._backoff, error, f"this node cannot {what}")
            except RdzvEtcdError as error:
                await self._wait_out(error)

    def _possible(self) -> LeadStep:
        """What to do about the lead, as long as the control keys can be read: every write is
        guarded by what is known, and would be refused."""
        return LeadStep.LEAVE if self._context.control.is_blind else self._lead_step()

    async def _resign(self, control: Control) -> None:
        """Let others lead while this node finishes its run, or is left behind."""
        context = self._context
        result = await context.etcd.txn(requests.resign(context.keys, control), repeatable=True)
        if context.control.view.leader_revision == control.leader_revision:
            context.show_written(result.revision, leader=None, leader_revision=0)

    async def _claim(self) -> None:
        context = self._context
        self._has_claimed = True
        formed = context.control.view.formed
        delay_s = claim_delay_s(
            None if formed is None else self._member.rank_in(formed),
            0 if formed is None else formed.size,
            context.clock.jitter(0.02),
        )
        if delay_s > 0:
            await context.clock.sleep(delay_s)
        session = context.session.lease_id
        if context.control.view.leader is not None or not self._member.is_active or not session:
            return
        leader = Leader(context.identity.node_id, context.settings.job)
        result = await context.write(requests.claim(context.keys, leader, session), session)
        if result is not None:
            context.show_leader(leader, result)

    async def _lead(self, fence: int) -> None:
        context = self._context
        keys, clock = context.keys, context.clock
        presences: ViewWatch[Nodes] = ViewWatch(
            context.etcd,
            clock,
            context.wakeup,
            request=keys.nodes.read(),
            in_parts=True,
            build=lambda result: self._read(result, presences.seen),
            fold=lambda nodes, batch: nodes_after(
                keys, nodes, batch.revision, batch.events, clock.now_s()
            ),
        )
        # If etcd went back, its revision may have passed what this watch has seen before the watch
        # is there again, which then does not notice it: that on the control keys speaks for both.
        regressions = self._member.regressions
        try:
            self.closer.prepare_leases(context.control.view)
            await presences.open()
            self._has_read = True
            async with beside(presences.run()) as following:
                following.add_done_callback(lambda _: context.wakeup.notify())
                while (
                    self._lead_step() is LeadStep.LEAD
                    and context.control.view.leader_revision == fence
                    and self._member.regressions == regressions
                    and not context.control.is_blind
                    and not following.done()
                ):
                    await self._step(presences)
                if following.done():
                    following.result()
        except EtcdError as error:
            self._note_problem(error, has_worked=self._has_read)
            await clock.sleep(self._backoff.after(error))
        finally:
            await presences.close()
            await self.closer.drop_leases()

    def _read(self, result: GetResult, before: Nodes | None) -> Nodes:
        context = self._context
        nodes = nodes_from(context.keys, result, context.clock.now_s(), before)
        if before is not None and nodes_went_back(before, nodes):
            self._member.doubt(nodes.revision)
            context.session.note_instability()
        return nodes

    async def _step(self, presences: ViewWatch[Nodes]) -> None:
        """Decide once and act, or wait for something to change."""
        context = self._context
        if presences.problem is not None:
            self._note_problem(presences.problem, has_worked=True)
            await context.wakeup.wait()
            return
        began_s = context.clock.now_s()
        try:
            until_s = await self._act(presences)
        except LeaseNotFoundError:
            await self.closer.replace_leases()
            await self._recover(presences)
        except EtcdError as error:
            if isinstance(error, EtcdRefusedError):
                self._note_problem(error)
            else:
                context.log.info(f"this node, as leader, tries again: {error}")
            self._member.arrivable_s = max(self._member.arrivable_s, context.clock.now_s())
            await self._recover(presences, self._backoff.after(error))
        else:
            self._backoff.reset()
            self._problem = None
            now_s = context.clock.now_s()
            if until_s is None or until_s > now_s:
                await context.wakeup.wait(until_s)
                paused_until_s = now_s + min(_PAUSES * (now_s - began_s), _LONGEST_PAUSE_S)
                await context.clock.sleep(paused_until_s - context.clock.now_s())

    async def _act(self, presences: ViewWatch[Nodes]) -> float | None:
        """Decide and act; return until when there is nothing to do if nothing changes."""
        context, seen = self._context, self._context.control.view
        control, usable_s = await self._roster.fill(seen)
        nodes, now_s = presences.view, context.clock.now_s()
        self._warn_of_unreadable(nodes)
        record = self._member.record
        if record is not None and control.is_behind(record):
            return now_s + RETRY_S  # etcd went back: repair puts this node's round into its place
        if context.control.view is not seen:
            return now_s
        if now_s < usable_s:
            return min(usable_s, now_s + RETRY_S)
        step = leader_step(self._member, control, nodes, context.settings, self._times(now_s))
        if isinstance(step, Change):
            done = await self._publish(control, nodes, step)
        elif isinstance(step, Close):
            done = await self.closer.close(control, nodes, step)
        else:
            return _earliest(step.until_s, context.log.progress(step.reason, now_s))
        # If it was refused, a node joined (again) in this very moment, or the lead is gone: the
        # watches show it, if they have not done so already.
        news = presences.view is not nodes or not _same_keys(context.control.view, seen)
        return now_s if done or news else now_s + RETRY_S

    def _warn_of_unreadable(self, nodes: Nodes) -> None:
        """Warn once of each key among the presences that no node has written."""
        found, reported = nodes.unreadable, self._unreadable
        for node_id, what in found.items():
            if node_id in reported or len(reported) > _MOST_REPORTED:
                continue
            reported.add(node_id)
            text = f"not counted among the nodes: {what.problem}"
            if len(reported) > _MOST_REPORTED:
                text = (
                    f"there are {len(found)} keys among the nodes that this library did not write; "
                    "no more of them are reported"
                )
            self._context.log.warn(text)

    def _times(self, now_s: float) -> Times:
        session = self._context.session
        return Times(
            now_s,
            session.in_contact_since_s(),
            session.trust_absence_s(),
            self._roster.incomplete_since_s,
            session.longest_ttl_s,
            session.round_trip_s,
        )

    async def _publish(self, control: Control, nodes: Nodes, change: Change) -> bool:
        """Publish the change; ``False`` if things are not as they were when it was decided."""
        context = self._context
        result = await context.etcd.txn(
            requests.publish_change(context.keys, control, change, nodes),
            timeout_s=context.urgent_limit_s,
        )
        if not result.succeeded:
            await context.control.refresh()
            return False
        context.show_written(result.revision, change=change, change_revision=result.revision)
        context.log.names.learn(nodes.present)  # not at each of thousands of arrivals
        for node_id, after_s in losses(change, nodes, context.clock.now_s()).items():
            context.recorder.declared_lost(cause_of_loss(change.lost[node_id]), after_s)
        why = text_of_change(change, context.log.names)
        context.log.info(f"round {change.round} is over: {why}")
        return True

    # -- trouble --------------------------------------------------------------------------------

    async def _recover(self, presences: ViewWatch[Nodes], wait_s: float = RETRY_S) -> None:
        """After a failed or unknown write: wait a little, then look at how things are."""
        await self._context.clock.sleep(wait_s)
        with contextlib.suppress(RdzvEtcdError):  # the loop comes back here until etcd answers
            await self._context.control.refresh()
            await presences.refresh()

    async def _wait_out(self, problem: RdzvEtcdError) -> None:
        """Do nothing until what keeps this node from leading may have been fixed."""
        context = self._context
        self._note_problem(problem, has_worked=self._has_read)
        if context.control.problem is None:  # nothing will show that it is over
            await context.clock.sleep(RETRY_S)
            return
        until_s = context.clock.now_s() + context.session.renewal_period_s
        await context.wakeup.wait(until_s, when=lambda: context.control.problem is None)
        if context.control.problem is not None:
            with contextlib.suppress(RdzvEtcdError):  # then it is still there
                await context.control.refresh()

    def _note_problem(self, problem: RdzvEtcdError, *, has_worked: bool = False) -> None:
        """Let a join that waits on this node's lead fail with the cause; ``has_worked``: what fails
        now has worked before."""
        context = self._context
        if isinstance(problem, EtcdUnavailableError):
            context.log.info(f"this node cannot lead at the moment: {problem}")
            return
        if type(problem) is not type(self._problem):
            context.log.warn(f"this node cannot lead: {problem}")
        if not isinstance(problem, StateCorruptError):  # the view of the control keys has that
            now_s = context.clock.now_s()
            if self._problem is None:
                self._problem_since_s = now_s
            self._problem = problem
            self.is_unfit = is_unfit_to_lead(
                self._member,
                context.control.view,
                has_worked=has_worked,
                has_claimed=self._has_claimed,
                lasts_s=now_s - self._problem_since_s,
                lease_ttl_s=context.settings.timing.lease_ttl_s,
            )
            context.wakeup.notify()


def _same_keys(one: Control, other: Control) -> bool:
    return (one.round_revision, one.leader_revision, one.change_revision) == (
        other.round_revision,
        other.leader_revision,
        other.change_revision,
    )


def _earliest(*times_s: float | None) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)
