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
}
_DELETE_EVENT = 1  # mvccpb.Event.DELETE


class Codec:
    """Encodes requests and decodes responses; holds the generated message classes."""

    def __init__(self) -> None:
        self.rpc = stubs.load()

    # -- requests ---------------------------------------------------------------------------------

    def get(self, request: api.Get) -> Any:
        return self.rpc.RangeRequest(**_range_fields(request))

    def txn(self, request: api.Txn) -> Any:
        """Build the request; never one that etcd would take for a transaction that only reads.

        etcd up to 3.5.4 ends when it applies such a one and the caller has gone meanwhile
        (https://github.com/etcd-io/etcd/issues/14110; 3.5.5 and 3.5.6 end in another way, #14891).
        An operation that is no read keeps it off that path: an empty transaction is one, changes
        nothing, and needs neither space nor the right to write. It goes through etcd's log, as
        writes do.
        """
        # From plain dicts: half the time that a message object for every part takes.
        fields = _txn_fields(request)
        if all(isinstance(op, api.Get) for op in (*request.success, *request.failure)):
            fields["failure"].append({"request_txn": {}})
        return self.rpc.TxnRequest(**fields)

    def watch(
        self,
        key: bytes,
        range_end: bytes | None,
        start_revision: int,
        *,
        puts_only: bool = False,
    ) -> Any:
        """Build the request that opens a watch.

        Progress notifications (every ten minutes) let a quiet watch move its resume point on, so
        that a later reconnect does not ask for a revision that was compacted meanwhile.
        """
        create = self.rpc.WatchCreateRequest(
            key=key,
            range_end=range_end or b"",
            start_revision=start_revision,
            progress_notify=True,
            filters=(self.rpc.WatchCreateRequest.NODELETE,) if puts_only else (),
        )
        return self.rpc.WatchRequest(create_request=create)


def _txn_fields(request: api.Txn) -> dict[str, Any]:
    return {
        "compare": [_compare_fields(guard) for guard in request.guards],
        "success": [_op_fields(op) for op in request.success],
        "failure": [_op_fields(op) for op in request.failure],
    }


def _compare_fields(guard: api.Compare) -> dict[str, Any]:
    target, field = _TARGETS[guard.target]
    return {
        "result": _RELATIONS[guard.relation],
        "target": target,
        "key": guard.key,
        "range_end": guard.range_end or b"",
        field: guard.operand,
    }


def _range_fields(request: api.Get) -> dict[str, Any]:
    order = {"sort_order": 2, "sort_target": 3} if request.newest_first else {}  # DESCEND, MOD
    return {
        **order,
        "key": request.key,
        "range_end": request.range_end or b"",
        "limit": request.limit,
        "keys_only": request.keys_only,
        "count_only": request.count_only,
    }


def _op_fields(op: api.Op) -> dict[str, Any]:
    if isinstance(op, api.Get):
        return {"request_range": _range_fields(op)}
    if isinstance(op, api.Put):
        return {
            "request_put": {
                "key": op.key,
                "value": op.value,
                "lease": op.lease_id,
                "ignore_value": op.ignore_value,
            }
        }
    if isinstance(op, api.Delete):
        return {"request_delete_range": {"key": op.key, "range_end": op.range_end or b""}}
    return {"request_txn": _txn_fields(op)}


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
    )


def txn_result(request: api.Txn, message: Any, revision: int = 0) -> api.TxnResult:
    """Return the answer to what was asked, without that to what :meth:`Codec.txn` added."""
    at = message.header.revision or revision
    asked = request.success if message.succeeded else request.failure
    return api.TxnResult(
        revision=at,
        succeeded=message.succeeded,
        results=tuple(
            _op_result(op, response, at)
            for op, response in zip(asked, message.responses, strict=False)
        ),
    )


def event(message: Any) -> api.Event:
    kind = api.EventKind.DELETE if message.type == _DELETE_EVENT else api.EventKind.PUT
    return api.Event(kind, key_value(message.kv))


def _op_result(op: api.Op, message: Any, revision: int) -> api.OpResult:
    if isinstance(op, api.Txn):
        return txn_result(op, message.response_txn, revision)
    kind = message.WhichOneof("response")
    if kind == "response_range":
        return get_result(message.response_range, revision)
    return api.WriteResult(getattr(message, kind).header.revision or revision)
