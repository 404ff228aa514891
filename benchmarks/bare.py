"""The floor: a round's raft proposals and watch events, with nothing around them.

What any rendezvous on etcd has to pay from the last arrival on: that node's presence is one raft
proposal; the one who closes is told by a watch event; the closed round is one more proposal, and
one watch event tells everybody. Leases are granted, connections and watches open before, values
have the size of the real ones. There is no leader election, no settings check, no failover, no
retry, no keep-alive, no MASTER_ADDR, no store, no thread besides gRPC's own: calls and waits are
plain blocking gRPC from the process's main thread.

Each process is a node of its own, as with the real backends, so the floor contains what this
machine needs to wake N processes.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import grpc

from rdzv_etcd.etcd import messages

_LEASE_TTL_S = 600
_PRESENCE_BYTES = 250


class BareNode:
    """Node 0 closes the round."""

    def __init__(self, target: str, job: str, nodes: int, index: int) -> None:
        self._target = target
        self._nodes = nodes
        self._index = index
        self._prefix = f"/bare/{job}/"
        self._record = f"{self._prefix}round".encode()
        self._id = f"node-{index:05d}-0123456789abcdef"

    def prepare(self) -> None:
        self._rpc = messages.load()
        self._channel = grpc.insecure_channel(
            self._target, [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        )
        self._kv = self._rpc.KVStub(self._channel)
        leases = self._rpc.LeaseStub(self._channel)
        self._lease = leases.LeaseGrant(self._rpc.LeaseGrantRequest(TTL=_LEASE_TTL_S)).ID
        self._told = self._watch(self._record, None)
        if self._index == 0:
            start = f"{self._prefix}nodes/".encode()
            self._arrivals = self._watch(start, start[:-1] + b"0")

    def run(self) -> dict[str, Any]:
        presence = json.dumps({"id": self._id}).ljust(_PRESENCE_BYTES).encode()
        self._put(f"{self._prefix}nodes/{self._id}".encode(), presence)
        if self._index == 0:
            self._close()
        for response in self._told:
            if response.events:
                members = json.loads(response.events[0].kv.value)
                return {"rank": members.index(self._id)}
        raise RuntimeError("etcd ended the watch")

    def finish(self) -> None:
        leases = self._rpc.LeaseStub(self._channel)
        leases.LeaseRevoke(self._rpc.LeaseRevokeRequest(ID=self._lease))
        self._channel.close()

    def _close(self) -> None:
        members: list[str] = []
        while len(members) < self._nodes:
            for event in next(self._arrivals).events:
                members.append(event.kv.key.decode().rpartition("/")[2])
        self._put(self._record, json.dumps(members).encode())

    def _put(self, key: bytes, value: bytes) -> None:
        """Put under the guard that no round was formed yet."""
        rpc = self._rpc
        guard = rpc.Compare(
            key=self._record,
            target=rpc.Compare.MOD,
            result=rpc.Compare.EQUAL,
            mod_revision=0,
        )
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=self._lease))
        if not self._kv.Txn(rpc.TxnRequest(compare=[guard], success=[put])).succeeded:
            raise RuntimeError("the guard failed: the round was formed already")

    def _watch(self, key: bytes, range_end: bytes | None) -> Iterator[Any]:
        """Open a watch; returns when etcd has confirmed it."""
        rpc = self._rpc
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        create = rpc.WatchCreateRequest(key=key, range_end=range_end or b"")
        requests.put(rpc.WatchRequest(create_request=create))
        responses: Iterator[Any] = rpc.WatchStub(self._channel).Watch(iter(requests.get, None))
        if not next(responses).created:
            raise RuntimeError("etcd confirmed no watch")
        return responses
