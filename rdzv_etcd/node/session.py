"""A node's etcd lease and its keep-alive. Knows when it last heard from etcd, not what for."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.log import LineTimes
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.node.waiting import Tasks, Wakeup

_log = logging.getLogger("rdzv_etcd")

_ROUND_TRIPS = 4
"""A reply may take this many times as long as the last one: TCP needs about three round trips to
resend what was lost, and giving up earlier would give up a connection that works."""
_REPLIES = 3
"""The quickest of so many replies shows how far etcd is. One that came after an outage, or for
which the connection had to be made again, does not."""
_FAILURES = 3
"""After this many in a row, a renewal waits for as long as makes sense."""


class Session:
    """Keeps one lease alive, renewing it every third of its TTL, or of a shorter one in its world.

    ``lease_id`` is 0 while there is none: before :meth:`open`, and after etcd answered that the
    lease is gone. Silence of etcd does not end a session; only that answer does.

    Contact means that etcd renews the lease and that the client's watches are known to be up to
    date: a member of etcd may forward keep-alives and do nothing else.
    """

    def __init__(
        self,
        etcd: Etcd,
        clock: Clock,
        wakeup: Wakeup,
        ttl_s: int,
        reply_timeout_s: float,
        *,
        warn: Callable[[str], None],
        works: Callable[[], bool],
        recorder: Recorder | None = None,
    ) -> None:
        """``warn``: logs a line at WARNING. A silence of etcd is logged by it while ``works()``; a
        node that waits logs that anyway."""
        self._etcd = etcd
        self._clock = clock
        self._wakeup = wakeup
        self._ttl_s = ttl_s
        self._shortest_ttl_s = self._longest_ttl_s = 0
        """Of the leases of the world's members; 0: like this node's own."""
        self._reply_timeout_s = reply_timeout_s
        self._replies_s: deque[float] = deque(maxlen=_REPLIES)
        """How long the last replies took."""
        self._quickest_s = math.inf
        """How long the quickest of other requests took."""
        self._failures = 0
        """How many renewals in a row have failed."""
        self._warn = warn
        self._works = works
        self._recorder = recorder or Recorder()
        self._silence_lines = LineTimes()
        """When the present silence of etcd is logged."""
        self._renewals = Tasks()
        self._defect: BaseException | None = None
        """What a renewal failed with unexpectedly; :meth:`run` raises it."""
        self._renewed_s = -math.inf
        """When the last renewal was sent of those that were answered."""
        self._last_contact_s = clock.now_s()
        self._in_contact_since_s = self._last_contact_s
        self._unstable_s = -math.inf
        """When others may have lost their leases though they live: see :meth:`note_instability`."""
        self.lease_id = 0
        self.first_revision: int | None = None
        """The store's revision when the first lease was granted: what came before is the past."""

    async def open(self, timeout_s: float | None = None) -> int:
        """Grant a lease if there is none, and return its id. Raises EtcdError."""
        if not self.lease_id:
            began_s = self._clock.now_s()
            grant = await self._etcd.grant(self._ttl_s, timeout_s=timeout_s)
            self.note_round_trip(self._clock.now_s() - began_s)
            self.lease_id, self._renewed_s = grant.lease_id, began_s
            self._ttl_s = max(self._ttl_s, grant.ttl_s)
            if self.first_revision is None:
                self.first_revision = grant.revision
                # A node that has just started does not know what was: data may have been wiped, or
                # all members cut off and about to come back.
                self._last_contact_s = self._clock.now_s()
                self._unstable_s = self._last_contact_s
            self._note_contact()
            self._wakeup.notify()  # :meth:`run` waits for a lease
        return self.lease_id

    def lost(self, lease_id: int) -> None:
        """Note that etcd does not know the lease (any more)."""
        if lease_id and lease_id == self.lease_id:
            self.lease_id = 0
            # What took this lease may have taken the others' (data wiped, a long outage), even if
            # contact was there all the time.
            self.note_instability()
            self._wakeup.notify()

    def note_instability(self) -> None:
        """Note that others may have lost their leases though they live: etcd's data went back, or
        it refused this node what they need as well."""
        self._unstable_s = self._clock.now_s()

    def note_ttls(self, shortest_s: int, longest_s: int) -> None:
        """Note the shortest and the longest TTL of the leases in this node's world. They differ
        while the option is being changed: a cut that ends one lease leaves another alone."""
        if (shortest_s, longest_s) != (self._shortest_ttl_s, self._longest_ttl_s):
            self._shortest_ttl_s, self._longest_ttl_s = shortest_s, longest_s
            self._wakeup.notify()  # :meth:`run` may have to renew sooner

    @property
    def ttl_s(self) -> int:
        """The TTL of this node's lease."""
        return self._ttl_s

    @property
    def longest_ttl_s(self) -> int:
        """The longest TTL of the leases in this node's world: within this time a member that has
        lost its lease is back, if it can reach etcd."""
        return self._longest_ttl_s or self._ttl_s

    @property
    def _cut_off_s(self) -> float:
        """After how long without an answer the lease of a member may have run out; a lease that is
        renewed every third of its TTL does not run out in less."""
        return (self._shortest_ttl_s or self._ttl_s) / 2

    @property
    def round_trip_s(self) -> float:
        """How long etcd took to answer the quickest of the last keep-alives and, while these are
        few, of other requests; 0 before all of them.

        At most a tenth of the TTL, the farthest that etcd may be: what seems to take longer is this
        process's own pause, or a clock that jumped.
        """
        took_s = min(self._replies_s, default=math.inf)
        if len(self._replies_s) < _REPLIES:  # perhaps just one, when etcd elected a leader
            took_s = min(took_s, self._quickest_s)
        return 0.0 if took_s == math.inf else min(took_s, self._ttl_s / 10)

    def note_round_trip(self, took_s: float) -> None:
        """Note how long a request took: the first one has to connect, a keep-alive comes late."""
        self._quickest_s = min(self._quickest_s, took_s)

    @property
    def renewal_period_s(self) -> float:
        """The time from one keep-alive to the next: short enough for the shortest lease in this
        node's world, so that the leader notices each cut in which that may have run out."""
        return min(self._ttl_s, self._shortest_ttl_s or self._ttl_s) / 3

    def trust_absence_s(self) -> float:
        """From when on (on the clock) another node's missing lease means that *it* was lost.

        While this node was cut off itself, the others may have been too: they get the longest TTL
        among them to come back after contact is there again. Half the shortest TTL without contact
        counts as cut off. So does the loss of this node's own lease.
        """
        now_s = self._clock.now_s()
        unstable_s = now_s if now_s - self._last_contact_s > self._cut_off_s else self._unstable_s
        return unstable_s + self.longest_ttl_s

    def in_contact_since_s(self) -> float:
        """Since when (on the clock) this node has heard from etcd all the time."""
        now_s = self._clock.now_s()
        cut_off = now_s - self._last_contact_s > self._cut_off_s
        return now_s if cut_off else self._in_contact_since_s

    async def run(self) -> None:
        """Renew the lease until cancelled; sets ``lease_id`` to 0 and notifies when it is gone.

        A renewal begins a period after the one before, whether or not that is answered by then: a
        slow or lost reply must not delay the next request.
        """
        try:
            while True:
                period_s = self.renewal_period_s
                is_shorter = partial(self._renews_within, period_s)
                await self._wakeup.wait(self._clock.now_s() + period_s, when=is_shorter)
                if not self.lease_id:
                    await self._wakeup.wait(when=lambda: self.lease_id != 0)
                elif not (self._failures and self._renewals):  # one that failed is tried again
                    self._renewals.start(self._renew(), self._fail)
                if self._defect is not None:
                    raise self._defect
        finally:
            await self._renewals.stop()

    def _renews_within(self, period_s: float) -> bool:
        return self.renewal_period_s < period_s

    def _fail(self, error: BaseException) -> None:
        self._defect = self._defect or error

    async def _renew(self) -> None:
        """Renew until it is done, or a later renewal is under way, or there is no lease."""
        while self.lease_id:
            lease_id, began_s = self.lease_id, self._clock.now_s()
            try:
                left_s = await self._etcd.keep_alive(lease_id, timeout_s=self.reply_limit_s())
            except EtcdError as error:
                if not self._failures:
                    _log.info("etcd does not answer; the work continues (%s)", error)
                self._failures += 1
                self._recorder.etcd_silent()
                self._log_silence("answered", error)
                if len(self._renewals) > 1:
                    return
                await self._clock.sleep(min(1.0, self._ttl_s / 9))
                continue
            took_s, failures, self._failures = self._clock.now_s() - began_s, self._failures, 0
            if left_s:
                self._renewed_s = max(self._renewed_s, began_s)
                if not await self._is_up_to_date():
                    return
            if self._silence_lines.any_logged:
                silent_s = self._clock.now_s() - self._last_contact_s
                self._warn(f"etcd answers again, after {silent_s:.0f} s")
            elif failures:
                _log.info("etcd answers again")
            self._silence_lines = LineTimes()
            self._replies_s.append(took_s)
            self._recorder.etcd_answered(took_s, self._clock.wall_s())
            self._note_contact()
            if left_s == 0:
                self.lost(lease_id)
            return

    async def _is_up_to_date(self) -> bool:
        """Whether the client's watches are known to bring what there is: the member of etcd that
        passes keep-alives on may have stopped all else."""
        health = self._etcd.watch_health
        if health.unsure_s > self._cut_off_s:
            await health.check_now()
        if health.unsure_s <= self._cut_off_s:
            return True
        self._log_silence("shown that this node's view of the job is up to date", health.problem)
        return False

    def _log_silence(self, what: str, error: EtcdError | None) -> None:
        silent_s = self._clock.now_s() - self._last_contact_s
        if self._works() and self._silence_lines.is_due(silent_s):
            self._warn(f"etcd has not {what} for {silent_s:.0f} s; the work continues ({error})")

    def reply_limit_s(self) -> float:
        """How long to wait for the next reply before the connection is taken for dead."""
        longest_s = max(self._reply_timeout_s, self._ttl_s / 2)
        if not self._replies_s or self._failures >= _FAILURES:
            return longest_s  # perhaps it is not silent, but far away by now
        return max(self._reply_timeout_s, min(_ROUND_TRIPS * self._replies_s[-1], longest_s))

    async def end(self, timeout_s: float) -> None:
        """Revoke the lease, and with it all keys on it. Raises EtcdError."""
        lease_id, self.lease_id = self.lease_id, 0
        if lease_id:
            await self._etcd.revoke(lease_id, timeout_s=timeout_s)

    def _note_contact(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._last_contact_s > self._cut_off_s:
            self._unstable_s = now_s
            self._in_contact_since_s = now_s
        self._last_contact_s = now_s
