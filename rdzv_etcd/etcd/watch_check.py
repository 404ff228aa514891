"""Checks that watches are not deaf: compares what they have delivered with what a read shows.

A watch can fall silent without an error. A member of etcd whose disk hangs answers pings and
forwards keep-alives, but applies nothing; a proxy may stall one stream; etcd may forget a watch.
Only a read shows that, so about once a period each watched range is read: how many keys there are,
and which was written last. Knows watches and revisions; must not know what the keys mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Protocol, TypeAlias

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    RevisionRegressedError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import Event, EventKind, Get, GetResult, keys_text

_log = logging.getLogger("rdzv_etcd")

DEFAULT_PERIOD_S = 10.0
_GRACE_S = 1.0
_GRACE_PERIODS = 0.25
_ROUND_TRIPS = 4
"""A watch may deliver a change this much later than a read shows it: an etcd that serves thousands
of watches takes seconds. A watch that delivers something meanwhile gets as long again."""
_LOOKS = 10
"""How often in that time it is tested whether the watch has delivered it."""
_JITTER_PERIODS = 0.25
_RETRIES_PER_PERIOD = 3

Keys: TypeAlias = "tuple[bytes, bytes | None]"


class Delivered:
    """What one watch has delivered so far."""

    def __init__(self, *, puts_only: bool) -> None:
        self._puts_only = puts_only
        self.batches = 0
        self._base: tuple[int, int] | None = None
        """A revision, and how many keys there were then, if that is known."""
        self._changes: deque[tuple[int, int]] = deque()
        """By how many keys there were more or fewer at each revision since."""

    def take(self, events: Collection[Event]) -> None:
        """Note events, of one revision or more, that have just arrived."""
        self.batches += 1
        if self._puts_only:
            return
        for event in events:
            if event.kind is EventKind.DELETE:
                self._changes.append((event.kv.mod_revision, -1))
            elif event.kv.version == 1:
                self._changes.append((event.kv.mod_revision, 1))

    def count_from(self, revision: int, count: int) -> None:
        """Count from here: a read showed ``count`` keys at a revision after the watch began."""
        if self._base is not None and revision < self._base[0]:
            return
        self._base = (revision, count)
        while self._changes and self._changes[0][0] <= revision:
            self._changes.popleft()

    def has_shown(self, result: GetResult, upto: int) -> bool:
        """Return whether it has delivered all that a read shows, being at the revision ``upto``."""
        if upto < result.revision:  # else all that came before is here, and more
            if any(kv.mod_revision > upto for kv in result.kvs):
                return False
            if self._base is not None and not self._puts_only:
                since, count = self._base
                count += sum(
                    change
                    for revision, change in self._changes
                    if since < revision <= result.revision
                )
                if count != result.count and since <= result.revision:
                    return False
        self.count_from(result.revision, result.count)
        return True


class CheckedWatch(Protocol):
    """What the check needs of a watch."""

    delivered: Delivered

    @property
    def keys(self) -> Keys: ...

    @property
    def upto(self) -> int:
        """The revision up to which it has delivered everything, as far as it knows; 0 while it need
        not: etcd has not confirmed it, its reader is behind, or it has ended."""

    def lose(self, error: BaseException) -> None:
        """End it: its reader gets ``error`` after what has arrived already."""


class WatchCheck:
    """Implements :class:`rdzv_etcd.etcd.port.WatchHealth` for the watches of one client."""

    def __init__(
        self,
        clock: Clock,
        watches: Callable[[], Iterable[CheckedWatch]],
        read: Callable[[Get, float], Awaitable[GetResult]],
        move: Callable[[], None],
    ) -> None:
        """``read`` (with a limit in seconds) is linearizable, uses the endpoint of the watches, and
        leaves it if there is no answer, as ``move`` does."""
        self._clock = clock
        self._watches = watches
        self._read = read
        self._move = move
        self._period_s = DEFAULT_PERIOD_S
        self._sure_s = 0.0
        """When the last check began that found all watches up to date."""
        self.problem: EtcdError | None = None
        self.listeners: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        """For the next check."""
        self._task: asyncio.Task[None] | None = None
        """The check that is under way."""

    def check_every(self, period_s: float) -> None:
        self._period_s = period_s

    def begin(self) -> None:
        """Begin to check, as there is a watch. Idempotent."""
        if self._timer is None and self._task is None:
            self._sure_s = self._clock.now_s()
            self._check_after(1)

    async def check_now(self) -> None:
        """Check without waiting for the period; a check that is under way counts."""
        if self._timer is not None:
            self._timer.cancel()
            self._start()
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Check no more, and wait until a check that is under way has ended."""
        task = self._task
        self.stop()
        if task is not None:
            await asyncio.wait([task])

    @property
    def unsure_s(self) -> float:
        if self._timer is None and self._task is None:
            return 0.0
        return max(0.0, self._clock.now_s() - self._sure_s - self._period_s)

    def _check_after(self, periods: float) -> None:
        """Check after about ``periods``, at another time than other clients."""
        pause_s = (periods - self._clock.jitter(_JITTER_PERIODS * periods)) * self._period_s
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._start)

    def _start(self) -> None:
        self._timer = None
        if any(True for _ in self._watches()):
            self._task = asyncio.create_task(self._check(), name="rdzv-etcd watch check")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._check_after(1 / _RETRIES_PER_PERIOD if self.problem else 1)
            return
        for watch in tuple(self._watches()):  # a defect: an unchecked watch must not be relied on
            watch.lose(error)

    async def _check(self) -> None:
        began_s = self._clock.now_s()
        before, self.problem = self.problem, await self._look()
        if self.problem is None:
            self._sure_s = began_s
        if before is not None or self.problem is not None:
            for listener in tuple(self.listeners):
                listener()

    async def _look(self) -> EtcdError | None:
        """Check every watch once; return why not all of them are known to be up to date."""
        watches = {watch: watch.upto for watch in self._watches() if watch.upto}
        began_s = self._clock.now_s()
        ranges = tuple(dict.fromkeys(watch.keys for watch in watches))
        answers = dict(zip(ranges, await asyncio.gather(*map(self._newest, ranges)), strict=True))
        took_s = self._clock.now_s() - began_s
        refused = [answer for answer in answers.values() if isinstance(answer, EtcdError)]
        for error in refused:
            if isinstance(error, EtcdUnavailableError):
                return error
        checked: dict[CheckedWatch, GetResult] = {}
        for watch, upto in watches.items():
            answer = answers[watch.keys]
            if isinstance(answer, EtcdError):
                continue  # etcd answers, and may let other ranges be read
            if answer.revision >= upto:
                checked[watch] = answer
            elif watch.upto:
                watch.lose(RevisionRegressedError(upto, answer.revision))
        grace_s = max(_GRACE_S, _GRACE_PERIODS * self._period_s) + _ROUND_TRIPS * took_s
        silent = await self._silent(checked, grace_s)
        return self._give_up(silent) if silent else next(iter(refused), None)

    async def _newest(self, keys: Keys) -> GetResult | EtcdError:
        """Read how many keys there are, and which was written last."""
        request = Get(*keys, limit=1, keys_only=True, newest_first=True)
        try:
            return await self._read(request, self._period_s)
        except EtcdError as error:
            return error

    async def _silent(
        self, checked: Mapping[CheckedWatch, GetResult], grace_s: float
    ) -> Collection[CheckedWatch]:
        """Return watches that lack what a read shows, and deliver nothing for a while."""
        late = list(checked)
        while late := [watch for watch in late if not _has_shown(watch, checked[watch])]:
            before = {watch: watch.delivered.batches for watch in late}
            for _ in range(_LOOKS):
                await self._clock.sleep(grace_s / _LOOKS)
                late = [watch for watch in late if not _has_shown(watch, checked[watch])]
                if not late:
                    return ()
            silent = [watch for watch in late if watch.delivered.batches == before[watch]]
            if silent:
                return silent
        return ()

    def _give_up(self, silent: Collection[CheckedWatch]) -> EtcdError:
        """Let the readers of silent watches start again, at another endpoint if there is one."""
        names = ", ".join(sorted({keys_text(*watch.keys) for watch in silent}))
        error = WatchLostError(
            f"etcd did not report changes of {names}, which a read shows; this client watches "
            "again over another connection"
        )
        _log.warning("%s", error)
        self._move()
        for watch in silent:
            watch.lose(error)
        return error


def _has_shown(watch: CheckedWatch, result: GetResult) -> bool:
    """Return whether it has delivered all that a read shows, or has ended."""
    return not watch.upto or watch.delivered.has_shown(result, watch.upto)
