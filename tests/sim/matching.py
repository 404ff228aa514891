"""Matches: which requests a fault of a link is about."""

from __future__ import annotations

from rdzv_etcd.etcd.port import Delete, Op, Put, Txn
from rdzv_etcd.protocol.keys import KeyRange
from rdzv_etcd.testing.model import RenewLease, Request
from rdzv_etcd.testing.network import Match


def puts(key: bytes) -> Match:
    """Match the transactions that may put ``key``."""

    def matching(request: Request) -> bool:
        return isinstance(request, Txn) and any(put.key == key for put in request.puts())

    return matching


def deletes(key: bytes) -> Match:
    """Match the transactions that may delete ``key`` alone."""

    def matching(request: Request) -> bool:
        return isinstance(request, Txn) and Delete(key) in request.success

    return matching


def touches(request: Request | Op, *ranges: KeyRange) -> bool:
    """Whether a transaction may put or delete a key there."""
    if isinstance(request, Txn):
        return any(touches(op, *ranges) for op in (*request.success, *request.failure))
    return isinstance(request, Put | Delete) and any(request.key in each for each in ranges)


def renews(lease_id: int) -> Match:
    """Match the keep-alives of one lease."""

    def matching(request: Request) -> bool:
        return isinstance(request, RenewLease) and request.lease_id == lease_id

    return matching


def noted(which: Match) -> tuple[Match, list[Request]]:
    """A match, and the list of what it has matched."""
    matched: list[Request] = []

    def matching(request: Request) -> bool:
        if not which(request):
            return False
        matched.append(request)
        return True

    return matching, matched
