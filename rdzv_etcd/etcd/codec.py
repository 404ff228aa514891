"""Translates between the port's plain values and etcd's protobuf messages.

Knows both vocabularies. Must not know gRPC, connections or retries.
"""

from __future__ import annotations

from typing import Any

from rdzv_etcd.etcd import api, stubs

# etcdserverpb.Compare.CompareTarget / CompareResult: the numbers are part of etcd's protocol.
_TARGETS = {
    api.Target.VERSION: (0, "version"),
    api.Target.CREATE: (1, "create_revision"),
    api.Target.MOD: (2, "mod_revision"),
    api.Target.VALUE: (3, "value"),
    api.Target.LEASE: (4, "lease"),
}
_RELATIONS = {
    api.Relation.EQUAL: 0,
    api.Relation.GREATER: 1,
    api.Relation.LESS: 2,
    api.Relation.NOT_EQUAL: 3,
}
_DELETE_EVENT = 1  # mvccpb.Event.DELETE


class Codec:
    """Encodes requests and decodes responses; holds the generated message classes."""

    def __init__(self) -> None:
        self.rpc = stubs.load()

    # -- requests ---------------------------------------------------------------------------------

    def get(self, request: api.Get) -> Any:
        return self.rpc.RangeRequest(
            key=request.key,
            range_end=request.range_end or b"",
            limit=request.limit,
            keys_only=request.keys_only,
            count_only=request.count_only,
        )

    def txn(self, request: api.Txn) -> Any:
        return self.rpc.TxnRequest(
            compare=[self._compare(guard) for guard in request.guards],
            success=[self._op(op) for op in request.success],
            failure=[self._op(op) for op in request.failure],
        )

    def watch(self, key: bytes, range_end: bytes | None, start_revision: int) -> Any:
        """Build the request that opens a watch.

        Progress notifications (every ten minutes) let a quiet watch move its resume point on, so
        that a later reconnect does not ask for a revision that was compacted meanwhile.
        """
        create = self.rpc.WatchCreateRequest(
            key=key,
            range_end=range_end or b"",
            start_revision=start_revision,
            progress_notify=True,
        )
        return self.rpc.WatchRequest(create_request=create)

    def _compare(self, guard: api.Compare) -> Any:
        target, field = _TARGETS[guard.target]
        operand: dict[str, Any] = {field: guard.operand}
        return self.rpc.Compare(
            result=_RELATIONS[guard.relation],
            target=target,
            key=guard.key,
            range_end=guard.range_end or b"",
            **operand,
        )

    def _op(self, op: api.Op) -> Any:
        if isinstance(op, api.Get):
            return self.rpc.RequestOp(request_range=self.get(op))
        if isinstance(op, api.Put):
            return self.rpc.RequestOp(
                request_put=self.rpc.PutRequest(
                    key=op.key,
                    value=op.value,
                    lease=op.lease_id,
                    ignore_value=op.ignore_value,
                    ignore_lease=op.ignore_lease,
                )
            )
        if isinstance(op, api.Delete):
            return self.rpc.RequestOp(
                request_delete_range=self.rpc.DeleteRangeRequest(
                    key=op.key, range_end=op.range_end or b""
                )
            )
        return self.rpc.RequestOp(request_txn=self.txn(op))


# -- responses ------------------------------------------------------------------------------------


def key_value(message: Any) -> api.KeyValue:
    return api.KeyValue(
        key=message.key,
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        version=message.version,
        lease_id=message.lease,
    )


def get_result(message: Any, revision: int = 0) -> api.GetResult:
    return api.GetResult(
        revision=message.header.revision or revision,
        kvs=tuple(key_value(kv) for kv in message.kvs),
        count=message.count,
        more=message.more,
    )


def txn_result(message: Any, revision: int = 0) -> api.TxnResult:
    at = message.header.revision or revision
    return api.TxnResult(
        revision=at,
        succeeded=message.succeeded,
        results=tuple(_op_result(response, at) for response in message.responses),
    )


def event(message: Any) -> api.Event:
    kind = api.EventKind.DELETE if message.type == _DELETE_EVENT else api.EventKind.PUT
    return api.Event(kind, key_value(message.kv))


def _op_result(message: Any, revision: int) -> api.OpResult:
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return get_result(message.response_range, revision)
    if kind == "response_put":
        return api.PutResult(message.response_put.header.revision or revision)
    if kind == "response_delete_range":
        response = message.response_delete_range
        return api.DeleteResult(response.header.revision or revision, response.deleted)
    return txn_result(message.response_txn, revision)
