"""A node's etcd lease and its keep-alive. Knows when it last heard from etcd, not what for."""

from __future__ import annotations

import logging

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.api import Etcd, LeaseGrant
from rdzv_etcd.group.pulse import Pulse

_log = logging.getLogger("rdzv_etcd")


class Session:
    """Keeps one lease alive, renewing it every third of its TTL.

    ``lease_id`` is 0 while there is none: before :meth:`open`, and after etcd said that the lease
    is gone. Not hearing from etcd does not end a session; only etcd's word does.
    """

    def __init__(
        self, etcd: Etcd, clock: Clock, pulse: Pulse, ttl_s: int, reply_timeout_s: float
    ) -> None:
        self._etcd = etcd
        self._clock = clock
        self._pulse = pulse
        self._ttl_s = ttl_s
        self._reply_timeout_s = reply_timeout_s
        self._last_contact_s = clock.now_s()
        self._shaken_until_s = 0.0
        self.lease_id = 0
        self.first_revision: int | None = None
        """The store's revision when the first lease was granted: what came before is the past."""

    async def open(self, timeout_s: float | None = None, granted: LeaseGrant | None = None) -> int:
        """Grant a lease if there is none (or take ``granted``), and return its id.

        Raises EtcdError.
        """
        if not self.lease_id:
            grant = granted or await self._etcd.grant(self._ttl_s, timeout_s=timeout_s)
            self.lease_id = grant.lease_id
            self._ttl_s = max(self._ttl_s, grant.ttl_s)
            if self.first_revision is None:
                self.first_revision = grant.revision
                # Who has just come does not know what was: data wiped, or all members cut off and
                # about to come back.
                self._last_contact_s = self._clock.now_s()
                self._shaken_until_s = self._last_contact_s + self._ttl_s
            self._note_contact()
            self._pulse.beat()  # :meth:`run` waits for a lease
        return self.lease_id

    def lost(self, lease_id: int) -> None:
        """Note that etcd does not know the lease (any more)."""
        if lease_id and lease_id == self.lease_id:
            self.lease_id = 0
            # What took this lease may have taken the others' (data wiped, a long outage), even if
            # contact was there all the time.
            self._shaken_until_s = self._clock.now_s() + self._ttl_s
            self._pulse.beat()

    def trust_absence_s(self) -> float:
        """From when on (on the clock) another node's missing lease means that *it* was lost.

        While this node was cut off itself, the others may have been too: they get one TTL to come
        back after contact is there again. Half a TTL without contact counts as cut off, because a
        lease that is renewed every third of its TTL cannot run out in less. So does the loss of
        this node's own lease.
        """
        now_s = self._clock.now_s()
        if now_s - self._last_contact_s > self._ttl_s / 2:
            return now_s + self._ttl_s
        return self._shaken_until_s

    async def run(self) -> None:
        """Renew the lease until cancelled; sets ``lease_id`` to 0 and beats when it is gone."""
        period_s = self._ttl_s / 3
        quiet = False
        while True:
            await self._clock.sleep(period_s if not quiet else min(1.0, period_s / 3))
            lease_id = self.lease_id
            if not lease_id:
                await self._pulse.wait()
                continue
            try:
                left_s = await self._etcd.keep_alive(lease_id, timeout_s=self._reply_timeout_s)
            except EtcdError as error:
                if not quiet:
                    _log.info("etcd does not answer; the work goes on (%s)", error)
                quiet = True
                continue
            if quiet:
                _log.info("etcd answers again")
            quiet = False
            self._note_contact()
            if left_s == 0:
                self.lost(lease_id)

    async def end(self, timeout_s: float) -> None:
        """Revoke the lease, and with it all keys on it. Raises EtcdError."""
        lease_id, self.lease_id = self.lease_id, 0
        if lease_id:
            await self._etcd.revoke(lease_id, timeout_s=timeout_s)

    def _note_contact(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._last_contact_s > self._ttl_s / 2:
            self._shaken_until_s = now_s + self._ttl_s
        self._last_contact_s = now_s
