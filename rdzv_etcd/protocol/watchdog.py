"""Decides whether the thread that owns a node is wedged: it has not called in for too long. Pure.

What counts is the time in which the library's own thread ran and looked: a process that was stopped
as a whole (SIGSTOP, a debugger, a paused machine) was not wedged, and its lease says what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Control
from rdzv_etcd.protocol.steps import waiting_count

_LOOKS = 8
_LONGEST_PERIOD_S = 1.0


def period_s(limit_s: float) -> float:
    """How often to look whether the thread has called in."""
    return min(_LONGEST_PERIOD_S, limit_s / _LOOKS)


@dataclass(frozen=True, slots=True)
class Vigil:
    """What was seen of the thread so far."""

    calls: int = 0
    """How often it had called in."""
    silent_s: float = 0.0
    """For how long it has not, while this process ran."""
    looked_s: float = 0.0
    """When somebody looked last, on the clock."""

    def is_wedged(self, limit_s: float) -> bool:
        return self.silent_s >= limit_s


def look(before: Vigil, calls: int, now_s: float, limit_s: float, *, is_excused: bool) -> Vigil:
    """Look at the thread once more, which has called in ``calls`` times by now.

    A look that comes late counts for nothing: whatever kept the library's thread from running, be
    it that the process was stopped, kept the other one from running too.
    """
    if is_excused or calls != before.calls:
        return Vigil(calls, 0.0, now_s)
    passed_s = now_s - before.looked_s
    if passed_s > 2 * period_s(limit_s):
        passed_s = 0.0
    return Vigil(calls, before.silent_s + passed_s, now_s)


def is_on_duty(member: Member, control: Control) -> bool:
    """Whether a member has to call in: it works in a world that is not over.

    When that is over, the others wait for it for ``rejoin_timeout`` and no longer: its workers may
    have a checkpoint to write.
    """
    if member.phase is not Phase.MEMBER or member.closure is not None:
        return False
    return waiting_count(control, member.record, member.evicted) == 0
