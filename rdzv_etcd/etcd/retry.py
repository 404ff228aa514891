"""How often each kind of call is tried: one tenacity policy per kind.

Knows verdicts and time. Must not know gRPC, endpoints or requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeAlias, TypeVar

import tenacity

from rdzv_etcd.clock import Clock
from rdzv_etcd.etcd.faults import AttemptError, Verdict

P = ParamSpec("P")
T = TypeVar("T")
Policy: TypeAlias = tenacity.AsyncRetrying

_NOT_DONE = frozenset({Verdict.NOT_SENT, Verdict.REFUSED, Verdict.STALE_TOKEN})

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call."""

    name: str
    repeat_after: frozenset[Verdict]
    """After which verdicts it is tried again."""
    writes: bool
    """Whether an unknown outcome must be told to the caller."""
    attempt_limit_s: float
    """Bounds one attempt, until no endpoint has answered within it: a slow link needs longer for
    large values. A silent connection the keep-alive pings end after 11 s, and etcd itself gives up
    a request after 7 s with default settings."""
    shared_limit_s: float
    """The same if there are other endpoints to turn to. What was under way when etcd's leader died
    is lost, but etcd answers only after its 7 s; the next leader is there within 1 to 2 s, and
    would have answered a request that is sent again."""


READ = Kind("read", _NOT_DONE | {Verdict.UNKNOWN}, False, 10.0, 3.0)
GUARDED_WRITE = Kind("guarded write", _NOT_DONE, True, 10.0, 10.0)
REPEATABLE_WRITE = Kind("repeatable write", _NOT_DONE | {Verdict.UNKNOWN}, True, 10.0, 3.0)
UNCLAIMED_GRANT = Kind("lease grant", _NOT_DONE | {Verdict.UNKNOWN}, False, 10.0, 3.0)
"""Of a lease whose id nobody has yet: one that is left behind carries nothing, and expires."""
KEEP_ALIVE = Kind("keep-alive", _NOT_DONE | {Verdict.UNKNOWN}, False, 2.0, 1.5)


class Deadline:
    """A point in time that a call with all its retries must not pass."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.timeout_s = timeout_s
        self._at_s = clock.now_s() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._at_s - self._clock.now_s())


class Pause:
    """Tells how long to wait before the next attempt.

    No wait while there are endpoints left to try; then doubling, with jitter, so that a fleet does
    not come back in step. ``good()`` starts over.
    """

    def __init__(self, clock: Clock, endpoints: int) -> None:
        self._clock = clock
        self._endpoints = endpoints
        self._failures = 0

    def good(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        self._failures += 1
        rounds, within = divmod(self._failures, self._endpoints)
        if within:
            return 0.0
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(rounds - 1, 10))
        return longest / 2 + self._clock.jitter(longest / 2)


async def attempts(
    policy: Callable[[], Policy],
    attempt: Callable[P, Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Make the first attempt, and let ``policy`` decide about others if it fails.

    The policy comes in only then: most attempts succeed at once, and it costs as much as they do.
    """
    try:
        return await attempt(*args, **kwargs)
    except AttemptError as failed:
        failures = [failed]

    async def again(*args: P.args, **kwargs: P.kwargs) -> T:
        if failures:
            raise failures.pop()
        return await attempt(*args, **kwargs)

    return await policy()(again, *args, **kwargs)


def bounded(
    kind: Kind, deadline: Deadline, pause: Pause, clock: Clock, give_up: Callable[[], bool]
) -> Policy:
    """Return the policy of one call: until it succeeds, its kind forbids it, or time is up."""
    return tenacity.AsyncRetrying(
        sleep=clock.sleep,
        retry=tenacity.retry_if_exception(
            lambda error: (
                isinstance(error, AttemptError) and error.fault.verdict in kind.repeat_after
            )
        ),
        stop=lambda _state: deadline.remaining_s() <= 0 or give_up(),
        wait=lambda _state: min(pause.next_s(), deadline.remaining_s()),
        reraise=True,
    )


def endless(pause: Pause, clock: Clock) -> Policy:
    """Return the policy of a watch: it outlives every outage, and ends with any other error."""
    return tenacity.AsyncRetrying(
        sleep=clock.sleep,
        retry=tenacity.retry_if_exception(
            lambda error: (
                isinstance(error, AttemptError) and error.fault.verdict is not Verdict.FINAL
            )
        ),
        stop=tenacity.stop_never,
        wait=lambda _state: pause.next_s(),
        reraise=True,
    )
