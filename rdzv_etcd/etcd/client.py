"""The real etcd: implements the port over gRPC.

Knows which of etcd's calls answers which of the port's, and which policy each one gets. Must not
know what the keys mean. Everything runs on one event loop, that of the first call.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import (
    EtcdPermissionError,
    EtcdRefusedError,
    EtcdUnavailableError,
    LeaseExistsError,
    LeaseNotFoundError,
    SettingsError,
)
from rdzv_etcd.etcd import messages, port, retry
from rdzv_etcd.etcd.auth import Authenticator, TlsFiles
from rdzv_etcd.etcd.channel import Server
from rdzv_etcd.etcd.first_contact import first_contact
from rdzv_etcd.etcd.grpc_start import require_free
from rdzv_etcd.etcd.retry import FAILBACK_AFTER_S, Deadline, Failover
from rdzv_etcd.etcd.watch import EtcdWatch
from rdzv_etcd.etcd.watch_check import WatchCheck
from rdzv_etcd.process import refuse_after_fork
from rdzv_etcd.settings.connection import Connection, Endpoint
from rdzv_etcd.settings.hosts import is_loopback

_log = logging.getLogger("rdzv_etcd")

_ANY_READ = port.Get(b"\x00", count_only=True, limit=1)
_NAMED_KEYS = 4

messages.load()  # from here on `import etcd3` works in the whole process


class EtcdClient:
    """Implements :class:`rdzv_etcd.etcd.port.Etcd`; see there for what each method promises.

    Making one reads the TLS files, and looks up names if there is a password without TLS: so it may
    block. It opens no connection, and any thread may do it. Raises
    :class:`EtcdTlsError`, :class:`SettingsError` (also if a password would be sent over plain http
    to another machine without permission), and :class:`EtcdError` if too few file descriptors are
    left.
    """

    def __init__(
        self,
        connection: Connection,
        clock: Clock | None = None,
        *,
        near: Collection[Endpoint] = (),
        readable: bytes | None = None,
        failback_after_s: float = FAILBACK_AFTER_S,
    ) -> None:
        """``near``: endpoints on this machine, which are preferred. ``readable``: a key that the
        user may read, as a read that is denied does not show whether etcd has another leader.
        ``failback_after_s``: about how long after its failure the preferred endpoint is tried
        again, in the background."""
        require_free()
        _require_private(connection)
        clock = SystemClock() if clock is None else clock
        refuse_after_fork()
        self._connection = connection
        self._rpc = messages.load()
        read = _ANY_READ if readable is None else port.Get(readable, count_only=True)
        probe = ("Range", messages.range_request(read))
        self._failover = Failover(
            _servers(connection, near, clock),
            Authenticator(connection.credentials, clock),
            clock,
            probe,
            failback_after_s,
        )
        self._renewal_refused = False
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self.watch_health = WatchCheck(
            clock, lambda: self._watches, self._read, self._failover.move
        )

    @property
    def closed(self) -> bool:
        return self._failover.closed

    async def connect(self) -> None:
        """Make the first contact, within ``connect_timeout_s``.

        Being denied the read that is sent counts as contact. Raises
        :class:`EtcdUnavailableError`, :class:`EtcdTlsError` or :class:`EtcdAuthError`, with the
        cause at each endpoint.
        """
        with contextlib.suppress(EtcdPermissionError):
            async with first_contact(self._connection):
                await self.get(_ANY_READ, timeout_s=self._connection.connect_timeout_s)

    async def get(self, request: port.Get, *, timeout_s: float | None = None) -> port.GetResult:
        message = messages.range_request(request)
        try:
            response = await self._failover.call(
                retry.READ, "Range", message, self._timeout_s(timeout_s)
            )
        except EtcdPermissionError as denied:
            raise EtcdPermissionError(f"{denied}: {_wanted(request)}") from None
        return messages.get_result(response)

    async def txn(
        self, request: port.Txn, *, timeout_s: float | None = None, repeatable: bool = False
    ) -> port.TxnResult:
        if request.reads_only:
            kind = retry.READ
        else:
            kind = retry.REPEATABLE_WRITE if repeatable else retry.GUARDED_WRITE
        deadline = Deadline(self._failover.clock, self._timeout_s(timeout_s))
        message = messages.txn_request(request)
        try:
            response = await self._failover.call(kind, "Txn", message, deadline.timeout_s)
        except LeaseNotFoundError:
            raise LeaseNotFoundError(await self._missing_lease(request, deadline)) from None
        except EtcdPermissionError as denied:
            raise EtcdPermissionError(f"{denied}: {_wanted(request)}") from None
        return messages.txn_result(request, response)

    async def grant(
        self, ttl_s: int, *, lease_id: int = 0, timeout_s: float | None = None
    ) -> port.LeaseGrant:
        deadline = Deadline(self._failover.clock, self._timeout_s(timeout_s))
        # A lease under an id that the caller does not know carries nothing, and expires.
        kind = retry.REPEATABLE_WRITE if lease_id else retry.READ
        # Chosen here, so that an attempt whose reply was lost leaves no second lease behind.
        lease_id = lease_id or 1 + secrets.randbits(62)
        message = self._rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease_id)
        try:
            response = await self._failover.call(kind, "LeaseGrant", message, deadline.timeout_s)
        except LeaseExistsError as error:
            if kind.writes and not error.maybe_applied:
                raise LeaseExistsError(lease_id) from None
            # An earlier attempt of this very call made it, and its reply was lost.
            return await self._own_grant(lease_id, deadline)
        return port.LeaseGrant(response.ID, response.TTL, response.header.revision)

    async def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:
        message = self._rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._failover.call(
                retry.REPEATABLE_WRITE, "LeaseRevoke", message, self._timeout_s(timeout_s)
            )
        except LeaseNotFoundError as error:
            return error.maybe_applied  # then an earlier attempt of this very call revoked it
        return True

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        message = self._rpc.LeaseKeepAliveRequest(ID=lease_id)
        try:
            response = await self._failover.call(
                retry.KEEP_ALIVE, "LeaseKeepAlive", message, self._timeout_s(timeout_s)
            )
        except EtcdRefusedError as error:
            if not self._renewal_refused:  # unlike an outage, it does not pass by itself
                self._renewal_refused = True
                _log.warning(
                    "etcd refuses to renew this node's lease, which expires unless this is fixed: "
                    "%s",
                    error,
                )
            raise
        self._renewal_refused = False
        return int(response.TTL)

    async def time_to_live(
        self, lease_id: int, *, timeout_s: float | None = None
    ) -> port.LeaseLeft | None:
        response = await self._time_to_live(lease_id, self._timeout_s(timeout_s))
        return None if response.TTL < 0 else port.LeaseLeft(response.TTL, response.grantedTTL)

    async def _time_to_live(self, lease_id: int, timeout_s: float) -> Any:
        message = self._rpc.LeaseTimeToLiveRequest(ID=lease_id)
        return await self._failover.call(retry.READ, "LeaseTimeToLive", message, timeout_s)

    def watch(
        self,
        key: bytes,
        range_end: bytes | None = None,
        *,
        start_revision: int,
        puts_only: bool = False,
        mark_resumes: bool = False,
    ) -> EtcdWatch:
        if self._failover.closed:
            raise EtcdUnavailableError("the etcd client is closed")
        watch = EtcdWatch(
            self._failover,
            (key, range_end),
            start_revision,
            self._revision,
            puts_only=puts_only,
            mark_resumes=mark_resumes,
        )
        self._watches.add(watch)
        self.watch_health.begin()
        return watch

    async def close(self) -> None:
        self._failover.closed = True  # nothing that fails from here on is tried again
        await self.watch_health.close()
        for watch in tuple(self._watches):
            await watch.close()
        await self._failover.close()

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._connection.request_timeout_s if timeout_s is None else timeout_s

    async def _read(self, request: port.Get, timeout_s: float) -> port.GetResult:
        try:
            return await self.get(request, timeout_s=timeout_s)
        except EtcdUnavailableError:
            if not self._failover.has_alternatives:  # otherwise it has moved already
                self._failover.move()
            raise

    async def _revision(self, key: bytes) -> int:
        result = await self.get(port.Get(key, limit=1, count_only=True))
        return result.revision

    async def _own_grant(self, lease_id: int, deadline: Deadline) -> port.LeaseGrant:
        response = await self._time_to_live(lease_id, deadline.remaining_s())
        if response.TTL < 0:
            raise LeaseNotFoundError(lease_id)
        return port.LeaseGrant(lease_id, response.grantedTTL, response.header.revision)

    async def _missing_lease(self, request: port.Txn, deadline: Deadline) -> int:
        """Find out which of a transaction's leases is gone; etcd does not name it."""
        candidates = sorted({put.lease_id for put in request.puts() if put.lease_id})
        for lease_id in candidates[:-1]:
            if await self.time_to_live(lease_id, timeout_s=deadline.remaining_s()) is None:
                return lease_id
        return candidates[-1]


def _wanted(request: port.Op) -> str:
    """Word what was to be done to which keys; etcd does not name those it denied."""
    wanted = tuple(dict.fromkeys(_parts(request)))
    more = len(wanted) - _NAMED_KEYS
    return ", ".join(wanted[:_NAMED_KEYS]) + (f" and {more} more" if more > 0 else "")


def _parts(op: port.Op) -> Iterator[str]:
    if isinstance(op, port.Txn):
        for guard in op.guards:
            yield f"read {port.keys_text(guard.key, guard.range_end)}"
        for part in (*op.success, *op.failure):
            yield from _parts(part)
    elif isinstance(op, port.Put):
        yield f"write {port.keys_text(op.key, None)}"
    else:
        verb = "read" if isinstance(op, port.Get) else "delete"
        yield f"{verb} {port.keys_text(op.key, op.range_end)}"


def _require_private(connection: Connection) -> None:
    """Refuse to send a password where it can be read on the way."""
    if connection.credentials is None or connection.tls or connection.allow_plain_password:
        return
    for endpoint in connection.endpoints:
        if not is_loopback(endpoint.host):
            raise SettingsError(
                f"the etcd password would be sent to http://{endpoint.target} in plain text, which "
                "anybody on the way can read: use https:// (protocol=https), or set "
                "allow_plain_password=1 if that network is trusted"
            )


def _servers(connection: Connection, near: Collection[Endpoint], clock: Clock) -> list[Server]:
    scheme = "http" if connection.tls is None else "https"
    credentials = None if connection.tls is None else TlsFiles(connection.tls, clock)
    return [
        Server(
            f"{scheme}://{endpoint.target}",
            endpoint.target,
            credentials,
            clock,
            is_near=endpoint in near,
        )
        for endpoint in connection.endpoints
    ]
