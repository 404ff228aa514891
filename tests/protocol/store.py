"""An etcd without time, and short ways to act on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rdzv_etcd.etcd.port import Delete, Get, GetResult, KeyValue, Put, Txn, TxnResult
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.model import (
    Accusation,
    Change,
    Closure,
    Control,
    Ended,
    NodeInfo,
    Nodes,
    Round,
    Slices,
)
from rdzv_etcd.protocol.ranks import cut
from rdzv_etcd.protocol.views import control_from, nodes_from
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing import Model
from rdzv_etcd.testing.model import Grant, Revoke

SETTINGS = JobSettings(1, 20)
JOB_LEASE = 77
ACCUSATION = Accusation("b~1~x", "its process exited", is_certain=True)


def info(name: str, arrived_for: int = 1) -> NodeInfo:
    return NodeInfo(name, "10.0.0.1", 2000, arrived_for, SETTINGS)


def world(number: int, *members: str) -> Round:
    return Round(number, "run", members, SETTINGS, "10.0.0.1", 2000, JOB_LEASE)


class Store:
    """An etcd without time, and short ways to act on it. A session is a lease: 1, 2 or 3."""

    def __init__(self) -> None:
        self.model = Model()
        self.keys = JobKeys("/p", "job/1")
        self.grant(1, 2, 3, JOB_LEASE)

    def grant(self, *leases: int) -> None:
        for lease in leases:
            self.model.step(Grant(60, lease))

    def revoke(self, lease: int) -> None:
        self.model.step(Revoke(lease))

    def do(self, txn: Txn) -> TxnResult:
        assert max(len(txn.guards), len(txn.success), len(txn.failure)) <= 128
        result = self.model.step(txn)
        assert isinstance(result, TxnResult)
        return result

    def does(self, txn: Txn) -> bool:
        return self.do(txn).succeeded

    def put(self, *keys: bytes, value: bytes = b"", lease: int = 0) -> None:
        self.do(Txn((), tuple(Put(key, value, lease) for key in keys)))

    def delete(self, key: bytes) -> None:
        self.do(Txn((), (Delete(key),)))

    # -- what is there ----------------------------------------------------------------------------

    def read(self, get: Get) -> GetResult:
        result = self.model.step(get)
        assert isinstance(result, GetResult)
        return result

    @property
    def control(self) -> Control:
        return control_from(self.keys, self.read(self.keys.control.read()))

    def nodes(self, now_s: float = 0.0, before: Nodes | None = None) -> Nodes:
        return nodes_from(self.keys, self.read(self.keys.nodes.read()), now_s, before)

    def here(self) -> set[str]:
        return set(self.nodes().present)

    def presence(self, node_id: str) -> KeyValue:
        (kv,) = self.read(requests.read_presence(self.keys, node_id)).kvs
        return kv

    def all_keys(self, within: KeyRange | None = None) -> set[bytes]:
        keys = self.keys.below if within is None else within
        return {kv.key for kv in self.read(keys.read()).kvs}

    # -- what nodes do ----------------------------------------------------------------------------

    def arrive(self, name: str, session: int) -> TxnResult:
        arriving = info(name, self.control.next_number)
        return self.do(requests.arrive(self.keys, arriving, session, self.control))

    def close(
        self,
        record: Round,
        *,
        control: Control | None = None,
        seen: int | None = None,
        audit: Mapping[str, object] | None = None,
        epoch_lease: int = 0,
    ) -> TxnResult:
        control = self.control if control is None else control
        seen = self.nodes().revision if seen is None else seen
        return self.do(
            requests.close_round(self.keys, control, seen, record, audit, epoch_lease=epoch_lease)
        )

    def form(self, *members: str) -> Round:
        record = world(self.control.next_number, *members)
        assert self.close(record, audit={"round": record.number}).succeeded
        return record

    def formed(self, *members: str) -> Round:
        """Form a round of members that have arrived, with the sessions 1, 2, …"""
        for session, name in enumerate(members, 1):
            self.arrive(name, session)
        return self.form(*members)

    def publish(
        self, change: Change, control: Control | None = None, nodes: Nodes | None = None
    ) -> bool:
        control = self.control if control is None else control
        return self.does(requests.publish_change(self.keys, control, change, nodes))

    def accuse(self, name: str, session: int, presence: KeyValue | None = None) -> TxnResult:
        presence = self.presence(name) if presence is None else presence
        return self.do(requests.accuse(self.keys, name, presence, ACCUSATION, session))

    def close_job(self, record: Round, lease: int) -> Txn:
        """Build the request that closes the job of ``record``."""
        closure = Closure("a", "done", True, 0.0)
        ended = (Ended(record.origin, closure, self.control.epoch),)
        marker = replace(record, closure=closure)
        return requests.close_job(
            self.keys, self.control, marker, ended, marker_lease=lease, ended_lease=lease
        )

    def large_world(self, edition: str, *members: str) -> tuple[Round, Slices]:
        """Publish the slices of a world of these members; its record is yet to come."""
        slices = Slices(len(members), 2, edition)
        record = replace(world(self.control.next_number), slices=slices)
        parts = cut(members, slices)
        for txn in requests.publish_slices(self.keys, self.control, record, slices, parts):
            assert self.does(txn)
        return record, slices
