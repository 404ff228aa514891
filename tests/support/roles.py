"""What a user's role lacks, as etcd checks it: before it does anything of a request.

Knows keys, requests and which keys are on which lease; no users. Sources: ``checkTxnAuth`` in
etcd's server/etcdserver/apply.go and ``LeaseRevoke`` in apply_auth.go (3.5), and what versions were
seen to do. As this does, 3.5.30 looks into nested transactions, and at all that is on a lease which
is renewed or to which something is put; 3.5.1 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rdzv_etcd.etcd.port import Delete, Get, Op, Txn
from rdzv_etcd.testing import MemoryEtcd
from rdzv_etcd.testing.model import RenewLease, Request, Revoke
from rdzv_etcd.testing.network import Match

_FROM_KEY = b"\x00"

KeysOf = Callable[[int], Collection[bytes]]
"""Returns the keys on a lease."""


@dataclass(frozen=True, slots=True)
class Lack:
    """That a key, or the range ``[key, range_end)``, may not be read, written, or either."""

    key: bytes
    range_end: bytes | None = None
    reads: bool = True
    writes: bool = True
    renewals: bool = True
    """Whether leases with such keys cannot be renewed either, if they cannot be written."""

    def touches(self, key: bytes, range_end: bytes | None = None) -> bool:
        """Whether a key, or some key of a range, is meant."""
        mine, theirs = _end(self.key, self.range_end), _end(key, range_end)
        return (theirs is None or self.key < theirs) and (mine is None or key < mine)

    def forbids(self, request: Request, keys_of: KeysOf) -> bool:
        """Whether etcd refuses a request: both branches of a transaction count, and all that is on
        a lease to which something is put, or which is revoked."""
        if isinstance(request, Get):
            return self.reads and self.touches(request.key, request.range_end)
        if isinstance(request, Revoke):
            return self._forbids_lease(request.lease_id, keys_of)
        if isinstance(request, RenewLease):
            return self.renewals and self._forbids_lease(request.lease_id, keys_of)
        return isinstance(request, Txn) and self._forbids_txn(request, keys_of)

    def _forbids_txn(self, request: Txn, keys_of: KeysOf) -> bool:
        if self.reads and any(self.touches(one.key, one.range_end) for one in request.guards):
            return True
        return any(self._forbids_op(op, keys_of) for op in (*request.success, *request.failure))

    def _forbids_op(self, op: Op, keys_of: KeysOf) -> bool:
        if isinstance(op, Get | Txn):
            return self.forbids(op, keys_of)
        if isinstance(op, Delete):
            return self.writes and self.touches(op.key, op.range_end)
        return (self.writes and self.touches(op.key)) or self._forbids_lease(op.lease_id, keys_of)

    def _forbids_lease(self, lease_id: int, keys_of: KeysOf) -> bool:
        return self.writes and any(self.touches(key) for key in keys_of(lease_id))


def _end(key: bytes, range_end: bytes | None) -> bytes | None:
    """The first key after a range, ``None`` if there is none."""
    if not range_end:
        return key + b"\x00"
    return None if range_end == _FROM_KEY else range_end


def forbidding(server: MemoryEtcd, lack: Lack) -> Match:
    """Return what to put into ``server.forbidden``, for every connection to lack this."""

    def keys_of(lease_id: int) -> Collection[bytes]:
        lease = server.model.leases.get(lease_id)
        return () if lease is None else lease.keys

    return lambda request: lack.forbids(request, keys_of)


def set_lacks(server: MemoryEtcd, *lacks: Lack) -> None:
    """Let every connection's user lack these permissions from now on, and no others."""
    server.forbidden[:] = [forbidding(server, lack) for lack in lacks]
