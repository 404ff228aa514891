"""The limits of one join: until when it waits, and what it does while etcd refuses or is away."""

from __future__ import annotations

import math

from rdzv_etcd.errors import (
    EtcdError,
    EtcdNoSpaceError,
    EtcdRefusedError,
    EtcdUnavailableError,
    OutcomeUnknownError,
)
from rdzv_etcd.node.backoff import Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol.member import Member, Phase

_HEADWAY_S = 5.0
"""How long before its own join ends a leader closes what can be closed: the write takes time, and
so does another try."""


class JoinLimits:
    """Counts a join's time; a spare of a healthy round has as much as it needs."""

    def __init__(self, context: NodeContext, member: Member, timeout_s: float) -> None:
        self._context = context
        self._member = member
        self._backoff = Backoff(context.session.renewal_period_s)
        self._told: set[type[EtcdError]] = set()
        self.timeout_s = timeout_s
        self.began_s = context.clock.now_s()
        self.belongs = member.epoch > 0
        """Whether the node was a member, or has arrived in this join: not a newcomer any more."""
        self.trouble: EtcdError | None = None
        """Why etcd does not do what it is asked, …"""
        self.trouble_since_s = 0.0
        """… and since when."""
        self.conflict = ""
        """What stands in the way of an arrival (see :mod:`rdzv_etcd.node.conflict`)."""

    def is_spare(self) -> bool:
        """Whether a healthy round is running and this node waits for a seat in the next one."""
        control, member = self._context.control.view, self._member
        formed = control.formed
        return (
            formed is not None
            and control.open_change is None
            and member.rank_in(formed) is None
            and member.unread(control) is None
        )

    def ends(self) -> bool:
        """Whether this join has nothing to wait for any more: the node has left or is drained, or
        its job is closed."""
        member = self._member
        return member.phase is Phase.GONE or member.drain is not None or member.closure is not None

    def deadline_s(self) -> float:
        """Until when to wait, on the clock.

        It counts from when the round was opened: a spare that has waited for days is still needed
        in the moment in which its seat becomes free.
        """
        if self.is_spare():
            return math.inf if self.trouble is None else self.trouble_since_s + self.timeout_s
        return max(self.began_s, self._member.opened_s) + self.timeout_s

    def plan_to_close(self) -> None:
        """Tell this node's lead when to close what can be closed."""
        headway_s = min(_HEADWAY_S, self.timeout_s / 10)
        self._member.plan_to_close(self.deadline_s() - headway_s)

    def limit_s(self) -> float:
        """How long the next request may take. Raises EtcdUnavailableError if no time is left."""
        remaining_s = self.deadline_s() - self._context.clock.now_s()
        if remaining_s <= 0:
            why = "etcd did not answer" if self.trouble is None else str(self.trouble)
            raise self._unanswered(why)
        return min(remaining_s, self._context.settings.connection.request_timeout_s)

    def note_arrival(self) -> None:
        """Note that the node has arrived: it is no newcomer any more."""
        self.belongs = True

    def note_unfit(self) -> None:
        """Note that the node may not do what its place asks of it: it does not belong."""
        self.belongs = False

    def note_conflict(self, problem: str) -> None:
        """Note what stands in the way of an arrival; nothing if it is empty."""
        self.conflict = problem

    def relieved(self) -> None:
        """Note that etcd did what it was asked."""
        if self.trouble is not None:
            self._member.note_trouble(self._context.clock.now_s())
        self.trouble = None
        self._told.clear()
        self._backoff.reset()

    async def sit_out(self, error: EtcdError) -> None:
        """Wait a little because of ``error``: etcd is away, or refuses.

        Raises ``error`` if etcd refuses a newcomer: that does no harm, and its launcher should hear
        of it at once. A member that gave up would end a job whose etcd only needs care. Raises an
        error of the same kind when the time is up.
        """
        context = self._context
        now_s = context.clock.now_s()
        self._member.note_trouble(now_s)
        if self.trouble is None:
            self.trouble_since_s = now_s
        self.trouble = error
        wait_s = self._backoff.after(error)
        if not isinstance(error, EtcdRefusedError):
            context.log.say(f"cannot reach etcd, trying again: {error}")
            await context.clock.sleep(wait_s)
            return
        if not self.belongs:
            raise error
        retry_at_s, deadline_s = now_s + wait_s, self.deadline_s()
        if retry_at_s >= deadline_s:
            raise self.last_word(error) from error
        if type(error) not in self._told:
            self._told.add(type(error))
            context.log.warn(f"waiting up to {deadline_s - now_s:.0f} s for etcd: {error}")
        seen = context.control.view.round_revision
        await context.wakeup.wait(
            retry_at_s,
            when=lambda: self.ends() or context.control.view.round_revision != seen,
        )

    def last_word(self, error: EtcdError) -> EtcdError:
        """What to raise when the time is up, ``error`` being the last one.

        That etcd refused all the time says more than that it did not answer in the end; whether
        what it did not answer was done matters to nobody who has given up.
        """
        cause = error if isinstance(error, EtcdRefusedError) else self.trouble
        if isinstance(cause, EtcdRefusedError):
            return _too_late(cause, self.timeout_s)
        return self._unanswered(str(error)) if isinstance(error, OutcomeUnknownError) else error

    def _unanswered(self, why: str) -> EtcdUnavailableError:
        number = self._context.control.view.next_number
        return EtcdUnavailableError(
            f"could not arrive for round {number} within {self.timeout_s:g} s: {why}"
        )


def _too_late(error: EtcdRefusedError, timeout_s: float) -> EtcdRefusedError:
    text = error.detail if isinstance(error, EtcdNoSpaceError) else str(error)
    return type(error)(f"the next round was not formed within {timeout_s:g} s: {text}")
