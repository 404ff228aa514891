"""``MemoryEtcd``: one simulated etcd cluster that many connections share.

Knows the model, the time leases run on, and the faults of a cluster (restart, wipe, compaction).
Knows no callers. Everything happens on one event loop's thread; nothing blocks.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import EtcdError, EtcdPermissionError, LeaseNotFoundError
from rdzv_etcd.etcd.port import Get, GetResult, KeyValue, LeaseGrant, LeaseLeft, prefix_end
from rdzv_etcd.testing.checks import Limits
from rdzv_etcd.testing.connection import MemoryConnection
from rdzv_etcd.testing.model import (
    Compact,
    Model,
    RenewLease,
    Request,
    Response,
    Revision,
    Revoke,
    TimeToLive,
)
from rdzv_etcd.testing.network import Link, Match

EXPIRY_TICK_S = 0.5
"""etcd looks for expired leases this often (lessor.go)."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One request that the server has handled, for observers."""

    at_s: float
    source: str
    """The connection's name; empty for the server itself (expiry, faults)."""
    request: Request
    outcome: Response | EtcdError
    changes: tuple[Revision, ...]


class MemoryEtcd:
    """An in-memory etcd v3 for tests.

    ``async with MemoryEtcd() as server: etcd = server.connect()``. Leases run on ``clock``, which
    must advance with the event loop's time (the default does, and so does a simulation's). Same
    ``seed`` and same schedule: same behaviour.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        seed: int = 0,
        limits: Limits | None = None,
        request_timeout_s: float = 60.0,
    ) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock(seed)
        self.limits = limits if limits is not None else Limits()
        self.request_timeout_s = request_timeout_s
        self.model = Model(self.limits)
        self.up = True
        """Whether the cluster answers; see :meth:`stop`."""
        self.overloaded = False
        """Whether no lease is renewed; see :meth:`set_overloaded`."""
        self.forbidden: list[Match] = []
        """Requests that match one of these fail with
        :class:`~rdzv_etcd.errors.EtcdPermissionError`, on every connection, as for a user whose
        role lacks what they need. A new watch counts as the ``Get`` of its keys; open ones stay.
        For one connection only, and everything: see :meth:`Link.refuse`."""
        self.requests: Counter[str] = Counter()
        """How many requests of each kind arrived, by the request's class name."""
        self.observers: list[Callable[[Applied], None]] = []
        self.connections: list[MemoryConnection] = []
        self._random = random.Random(seed)
        self._expiry_s: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.Context()

    async def __aenter__(self) -> MemoryEtcd:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def connect(
        self, name: str = "", *, request_timeout_s: float | None = None
    ) -> MemoryConnection:
        """Return a new connection with a :class:`Link` of its own (``connection.link``)."""
        connection = MemoryConnection(
            self,
            Link(random.Random(self._random.random())),
            name or f"connection-{len(self.connections) + 1}",
            self.request_timeout_s if request_timeout_s is None else request_timeout_s,
        )
        self.connections.append(connection)
        return connection

    async def close(self) -> None:
        """Close all connections and stop the lease timer. Idempotent."""
        for connection in list(self.connections):
            await connection.close()
        self._disarm()

    # -- looking inside ---------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self.model.revision

    def snapshot(self, prefix: bytes = b"") -> tuple[KeyValue, ...]:
        """Return all keys under ``prefix``, without a request."""
        start, end = (prefix, prefix_end(prefix)) if prefix else (b"\x00", b"\x00")
        return cast(GetResult, self.model.step(Get(start, end))).kvs

    def leases(self) -> dict[int, float]:
        """Return the seconds that each lease has left."""
        now_s = self.clock.now_s()
        return {lease_id: expiry_s - now_s for lease_id, expiry_s in self._expiry_s.items()}

    # -- faults of the cluster --------------------------------------------------------------------

    def stop(self) -> None:
        """Stop answering (quorum lost, all members down): calls hang, leases do not run out."""
        self.up = False
        self._disarm()
        self._tell_links(broken=True)

    def start(self) -> None:
        """Answer again; every lease restarts with its whole TTL, as under a new leader."""
        self.up = True
        self.extend_leases()
        self._tell_links(broken=False)

    def extend_leases(self) -> None:
        """Restart every lease with its whole TTL, as a new leader of etcd does."""
        now_s = self.clock.now_s()
        self._expiry_s = {
            lease_id: now_s + lease.ttl_s for lease_id, lease in self.model.leases.items()
        }
        self._arm()

    def restart(self, downtime_s: float = 0.0) -> None:
        """Break all connections and be away for ``downtime_s``."""
        self.stop()
        self.call_later(downtime_s, self.start)

    def wipe(self) -> None:
        """Lose everything: revision 1, no keys, no leases; a new cluster at the old address.

        Watches raise :class:`~rdzv_etcd.errors.RevisionRegressedError` when they are in contact
        again, unless the new cluster has reached their revision by then: a real one with the same
        members has the same cluster id, so a client cannot know.
        """
        self.model = self.model.emptied()
        self._expiry_s.clear()
        self._arm()
        self._tell_links(broken=True)

    def save(self) -> Model:
        """Return a snapshot of everything, for :meth:`restore`."""
        return self.model.copied()

    def restore(self, saved: Model, *, bump_revision: int = 0) -> None:
        """Go back to an older snapshot: what was written since is lost, what ended since is back.

        As when an operator restores a backup, or starts a new cluster from a member that lagged
        behind (``--force-new-cluster``). Leases that were in the snapshot begin again. Watches
        notice it as they do after :meth:`wipe`; with ``bump_revision`` (``--bump-revision
        --mark-compacted``) they end with :class:`~rdzv_etcd.errors.CompactedError` instead.
        """
        self.model = self.model.restored(saved, bump_revision)
        self.extend_leases()
        self._tell_links(broken=True)

    def compact(self, revision: int | None = None) -> None:
        """Forget the history before ``revision`` (default: the current one).

        Raises :class:`~rdzv_etcd.errors.CompactedError` if that was done before.
        """
        self.apply(Compact(self.revision if revision is None else revision))

    def expire(self, lease_id: int) -> None:
        """Let a lease run out now; its keys go in one revision."""
        if lease_id not in self.model.leases:
            raise LeaseNotFoundError(lease_id)
        self.apply(Revoke(lease_id))

    def expire_all(self) -> None:
        """Let all leases run out now, one after the other, before any can be renewed."""
        for lease_id in sorted(self.model.leases):
            self.expire(lease_id)

    def set_no_space(self, alarm: bool) -> None:
        """Raise or clear the NOSPACE alarm: puts and grants are refused while it is on."""
        self.model.no_space = alarm

    def set_overloaded(self, overloaded: bool) -> None:
        """Refuse to renew leases from now on, or no more; they run out meanwhile.

        New versions of etcd (seen: 3.5.30) do so while they are behind by more than a second with
        applying what is committed. Everything else continues, perhaps late.
        """
        self.overloaded = overloaded

    # -- for connections --------------------------------------------------------------------------

    def check_permission(self, request: Request) -> None:
        """Raise :class:`~rdzv_etcd.errors.EtcdPermissionError` for what is :attr:`forbidden`."""
        if any(matching(request) for matching in self.forbidden):
            raise EtcdPermissionError("etcdserver: permission denied")

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.Handle:
        """Call on the server's behalf: in no caller's context, so no paused node delays it."""
        loop = asyncio.get_running_loop()
        if delay_s <= 0:
            return loop.call_soon(callback, context=self._context)
        return loop.call_later(delay_s, callback, context=self._context)

    def apply(self, request: Request, source: str = "") -> Response:
        """Do one request now; notify watches. Raises the port's errors."""
        if source:
            self.requests[type(request).__name__] += 1
        if isinstance(request, RenewLease | TimeToLive):
            self._expire_if_due(request.lease_id)
        before = self.model.revision
        try:
            response = self.model.step(request)
        except EtcdError as error:
            self._observe(source, request, error, before)
            raise
        if isinstance(request, TimeToLive) and request.lease_id in self._expiry_s:
            left_s = int(self._expiry_s[request.lease_id] - self.clock.now_s())
            response = LeaseLeft(left_s, self.model.leases[request.lease_id].ttl_s)
        self._track_leases(request, response)
        self._observe(source, request, response, before)
        if self.model.revision != before:
            for connection in list(self.connections):
                connection.pump_watches()
        return response

    def _observe(
        self, source: str, request: Request, outcome: Response | EtcdError, before: int
    ) -> None:
        if self.observers:
            changes = tuple(self.model.history(before + 1))
            applied = Applied(self.clock.now_s(), source, request, outcome, changes)
            for observer in self.observers:
                observer(applied)

    def _tell_links(self, *, broken: bool) -> None:
        for connection in list(self.connections):
            if broken:
                connection.link.cuts += 1
            connection.link.changed()

    # -- leases -----------------------------------------------------------------------------------

    def _track_leases(self, request: Request, response: Response) -> None:
        if isinstance(response, LeaseGrant):
            self._expiry_s[response.lease_id] = self.clock.now_s() + response.ttl_s
            self._arm()
        elif isinstance(request, RenewLease) and isinstance(response, int):
            if response:
                self._expiry_s[request.lease_id] = self.clock.now_s() + response
        elif isinstance(request, Revoke):
            self._expiry_s.pop(request.lease_id, None)

    def _expire_if_due(self, lease_id: int) -> None:
        """A keep-alive on a lease that has run out waits in etcd until it is revoked."""
        expiry_s = self._expiry_s.get(lease_id)
        if self.up and expiry_s is not None and expiry_s <= self.clock.now_s():
            self.apply(Revoke(lease_id))

    def _arm(self) -> None:
        """Wake at the first tick at or after the earliest expiry."""
        self._disarm()
        if not self._expiry_s or not self.up:
            return
        now_s = self.clock.now_s()
        tick_s = math.ceil(min(self._expiry_s.values()) / EXPIRY_TICK_S) * EXPIRY_TICK_S
        delay_s = max(0.0, tick_s - now_s)
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, self._expire_due, context=self._context
        )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire_due(self) -> None:
        now_s = self.clock.now_s()
        due = sorted(
            (expiry_s, id_) for id_, expiry_s in self._expiry_s.items() if expiry_s <= now_s
        )
        for _, lease_id in due:
            self.apply(Revoke(lease_id))
        self._arm()
