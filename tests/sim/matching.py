"""Matches: which requests a fault of a link is about."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_etcd.etcd.port import Delete, Op, Put, Txn
from rdzv_etcd.protocol.codec import decode_place
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.testing.model import RenewLease, Request
from rdzv_etcd.testing.network import Match


def txns(which: Callable[[Txn], bool]) -> Match:
    """Match the transactions of which ``which`` is true."""
    return lambda request: isinstance(request, Txn) and which(request)


def puts(keys: bytes | KeyRange) -> Match:
    """Match the transactions that may put this key, or one of these."""

    def put_there(put: Put) -> bool:
        return put.key == keys if isinstance(keys, bytes) else put.key in keys

    return txns(lambda txn: any(map(put_there, txn.puts())))


def puts_presence(keys: JobKeys, node_id: str, which: Callable[[NodeInfo], bool]) -> Match:
    """Match the transactions that may put a node's presence of which ``which`` is true."""
    key = keys.node(node_id)

    def is_one(put: Put) -> bool:
        place = decode_place(key, node_id, put.value) if put.key == key else None
        return isinstance(place, NodeInfo) and which(place)

    return txns(lambda txn: any(map(is_one, txn.puts())))


def deletes(key: bytes) -> Match:
    """Match the transactions that may delete ``key`` alone."""
    return txns(lambda txn: Delete(key) in txn.success)


def touches(request: Request | Op, *ranges: KeyRange) -> bool:
    """Whether a transaction may put or delete a key there."""
    if isinstance(request, Txn):
        return any(touches(op, *ranges) for op in (*request.success, *request.failure))
    return isinstance(request, Put | Delete) and any(request.key in each for each in ranges)


def renews(lease_id: int) -> Match:
    """Match the keep-alives of one lease."""

    return lambda request: isinstance(request, RenewLease) and request.lease_id == lease_id


def noted(which: Match) -> tuple[Match, list[Request]]:
    """A match, and the list of what it has matched."""
    matched: list[Request] = []

    def matching(request: Request) -> bool:
        if not which(request):
            return False
        matched.append(request)
        return True

    return matching, matched
