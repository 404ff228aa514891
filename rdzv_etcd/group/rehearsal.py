"""Goes through the motions of a round once a node is ready, before anybody waits for it.

What a process does for the first time costs it several times as much as later on: Python adapts
its code as it runs, protobuf makes its classes for messages on first use, and none of it is in the
processor's caches. Nothing here is sent, and nothing is changed.
"""

from __future__ import annotations

from rdzv_etcd.core.model import Control, Leader, NodeInfo, Round
from rdzv_etcd.etcd.api import Event, EventKind, GetResult, KeyValue, PutResult, TxnResult
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.group.standing import Standing
from rdzv_etcd.schema import requests, values
from rdzv_etcd.schema.control import control_after

_TIMES = 10
"""CPython 3.11 adapts a function's code after eight calls."""


def rehearse(context: NodeContext) -> None:
    """Arrive, hear of the leader and of the round, and be admitted: in memory only."""
    for _ in range(_TIMES):
        _round(context)


def _round(context: NodeContext) -> None:
    keys, settings = context.keys, context.settings
    standing = Standing(context.identity.node_id)
    info = NodeInfo(standing.node_id, "192.0.2.1", 1, 1, settings.job, settings.rank_key)
    standing.begin_join(info)
    requests.arrive(keys, info, 1, 0)
    leader = Leader(info.node_id, settings.job)
    led = KeyValue(keys.leader, values.encode_leader(leader), 2, 2, 1, 1)
    requests.leader_after(leader, TxnResult(2, False, (GetResult(2, (led,), 1),)))
    requests.leader_after(leader, TxnResult(2, True, (PutResult(2),)))
    record = Round(1, "", (info.node_id,), settings.job, info.address, info.port, 1, 0)
    formed = KeyValue(keys.round, values.encode_round(record), 3, 3, 1, 1)
    control = Control(1)
    for kv in (led, formed):
        control = control_after(keys, control, 3, (Event(EventKind.PUT, kv),))
    standing.notice(control)
    standing.admit(control)
