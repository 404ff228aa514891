"""Goes through the motions of translating a transaction and a watch's events, in memory.

The first time costs several times as much as later ones: protobuf makes its classes and fields on
first use, and Python adapts its code as it runs. Knows the codec; sends nothing.
"""

from __future__ import annotations

from rdzv_etcd.etcd import api, codec
from rdzv_etcd.etcd.codec import Codec

_TIMES = 10
"""CPython 3.11 adapts a function's code after eight calls."""


def rehearse(messages: Codec) -> None:
    """Translate a nested transaction, its result and two events."""
    for _ in range(_TIMES):
        _request(messages)
        _replies(messages)


def _request(messages: Codec) -> None:
    put, get = api.Put(b"k", b"v", 1), api.Get(b"k", b"l")
    guard = api.Compare(b"k", api.Target.MOD, api.Relation.EQUAL, 1)
    vacant = api.Compare(b"k", api.Target.CREATE, api.Relation.EQUAL, 0)
    nested = api.Txn((vacant,), (put,), (get,))
    messages.txn(api.Txn((guard,), (put, nested), (get,))).SerializeToString()


def _replies(messages: Codec) -> None:
    rpc = messages.rpc
    header = rpc.ResponseHeader(revision=2)
    kv = {"key": b"k", "value": b"v", "create_revision": 2, "mod_revision": 2, "version": 1}
    read = rpc.ResponseOp(response_range=rpc.RangeResponse(kvs=[kv], count=1))
    nested = rpc.ResponseOp(response_txn=rpc.TxnResponse(responses=[read]))
    put = rpc.ResponseOp(response_put=rpc.PutResponse(header=header))
    told = rpc.TxnResponse(header=header, succeeded=True, responses=[put, nested])
    codec.txn_result(rpc.TxnResponse.FromString(told.SerializeToString()))
    news = rpc.WatchResponse(header=header, events=[{"kv": kv}, {"type": 1, "kv": kv}])
    for message in rpc.WatchResponse.FromString(news.SerializeToString()).events:
        codec.event(message)
