"""Every transaction about nodes that are to leave, or are not let in. No I/O."""

from __future__ import annotations

from rdzv_etcd.etcd.port import (
    Compare,
    Get,
    GetResult,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Drain, Refused


def read_drain(keys: JobKeys, node_id: str) -> Get:
    return Get(keys.drain(node_id))


def ask_to_drain(
    keys: JobKeys, node_id: str, drain: Drain, lease: int, *, revision: int = 0
) -> Txn:
    """Ask a node to leave, if one of that id is there.

    The request is on ``lease``, a lease of its own: the node is meant, whichever session it has by
    the time it hears of it. ``revision`` is that of what is there and is no drain (0: nothing); an
    earlier request stands.
    """
    key = keys.drain(node_id)
    return Txn(
        (
            Compare(keys.node(node_id), Target.CREATE, Relation.GREATER, 0),
            Compare(key, Target.MOD, Relation.EQUAL, revision),
        ),
        (Put(key, values.encode_drain(drain), lease),),
    )


def tell_drain(keys: JobKeys, node_id: str, drain: Drain, session: int) -> Txn:
    """Tell the others that this node is to leave, if its presence is there on that session.

    From then on the request is on the session: the node renews it, and it goes with the node. On
    success :func:`lease_before` returns the lease that the request was on.
    """
    key = keys.drain(node_id)
    return Txn(
        (Compare(keys.node(node_id), Target.LEASE, Relation.EQUAL, session),),
        (Get(key), Put(key, values.encode_drain(drain), session)),
    )


def lease_before(result: TxnResult) -> int:
    """Return the lease that a request was on before :func:`tell_drain`, 0 if there was none."""
    before = result.results[0]
    return before.kvs[0].lease_id if isinstance(before, GetResult) and before.kvs else 0


def note_refused(keys: JobKeys, refused: Refused, lease: int) -> Txn:
    """Show the job's nodes one that could not join. The first one stands: thousands may fail in the
    same way, and every node of the job hears of each write."""
    return Txn(
        (Compare(keys.refused, Target.MOD, Relation.EQUAL, 0),),
        (Put(keys.refused, values.encode_refused(refused), lease),),
    )
