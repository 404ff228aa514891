"""Every transaction about nodes that are to leave, or are not let in. No I/O."""

from __future__ import annotations

from rdzv_etcd.core.model import Drain, GateFailures, Stranger
from rdzv_etcd.etcd.api import Compare, Get, KeyValue, Put, Relation, Target, Txn
from rdzv_etcd.schema import values
from rdzv_etcd.schema.keys import JobKeys


def ask_to_drain(
    keys: JobKeys, node_id: str, presence: KeyValue, drain: Drain, *, revision: int = 0
) -> Txn:
    """Ask a node to leave, on its own session, which is that of the presence that was read.

    Who is there may have arrived again since: only the session counts. ``revision`` is that of what
    is there and is no drain (0: nothing). On failure the results hold what is there by now: an
    earlier one stands.
    """
    key = keys.drain(node_id)
    return Txn(
        (
            Compare(presence.key, Target.LEASE, Relation.EQUAL, presence.lease_id),
            Compare(key, Target.MOD, Relation.EQUAL, revision),
        ),
        (Put(key, values.encode_drain(drain), presence.lease_id),),
        (Get(key),),
    )


def tell_drain(keys: JobKeys, node_id: str, drain: Drain, session: int) -> Txn:
    """Tell the others that this node is to leave, if its presence is there on that session."""
    return Txn(
        (Compare(keys.node(node_id), Target.LEASE, Relation.EQUAL, session),),
        (Put(keys.drain(node_id), values.encode_drain(drain), session),),
    )


def read_gate(keys: JobKeys, host: str) -> Get:
    return Get(keys.gate(host))


def note_gate_failure(
    keys: JobKeys, host: str, failures: GateFailures, lease: int, *, revision: int
) -> Txn:
    """Remember a failure beside those that were read at ``revision`` (0: none).

    On failure the results hold what is there by now: another node of the host has failed, too.
    """
    key = keys.gate(host)
    return Txn(
        (Compare(key, Target.MOD, Relation.EQUAL, revision),),
        (Put(key, values.encode_gate(failures), lease),),
        (Get(key),),
    )


def note_stranger(keys: JobKeys, stranger: Stranger, lease: int) -> Txn:
    """Tell the job's nodes of one that other settings keep out. The first one stands: thousands may
    have been started so, and every node of the job hears of each write."""
    return Txn(
        (Compare(keys.stranger, Target.MOD, Relation.EQUAL, 0),),
        (Put(keys.stranger, values.encode_stranger(stranger), lease),),
    )
