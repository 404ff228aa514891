"""The bytes under every kind of key, as they are written today: nodes of two builds may meet.

A value that changes here has to stay readable, or all nodes of a job must be started again at once:
CHANGELOG.md has to mention it then. Values of the build before are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.model import (
    Accusation,
    Change,
    Closure,
    Drain,
    Ended,
    Leader,
    NodeInfo,
    Refused,
    Round,
    Slices,
    Ttls,
)
from rdzv_etcd.settings import JobSettings

KEY = b"/rdzv_etcd/job/ctl/thing"
A, B = "node-a~17~1f", "node-b~18~2f"
SETTINGS = JobSettings(2, 4, 2)
SETTINGS_TEXT = '"settings":{"min_nodes":2,"max_nodes":4,"node_unit":2}'
CLOSURE = Closure(A, "the workers have finished", True, 1795000000.5)
CLOSURE_TEXT = (
    f'"by":"{A}","reason":"the workers have finished","succeeded":true,"wall_s":1795000000.5'
)
NODE = NodeInfo(
    A,
    "10.0.0.1",
    40001,
    3,
    SETTINGS,
    rank_key="rack-1",
    domain="nvl-7",
    epoch_seen=41,
    epoch_trained=40,
    clock_us=99,
    data={"gpus": 8},
    peer_port=40002,
    round_trip_ms=12,
    because="its worker failed",
    lease_ttl_s=10,
    finished=True,
)
NODE_TEXT = (
    f'{{"v":1,"address":"10.0.0.1","port":40001,"arrived_for":3,{SETTINGS_TEXT},"rank_key":"rack-1",'
    '"domain":"nvl-7",'
    '"epoch_seen":41,"epoch_trained":40,"clock_us":99,"data":{"gpus":8},"peer_port":40002,'
    '"round_trip_ms":12,"because":"its worker failed"'
)
REFUSED = Refused(A, SETTINGS, 1795000000.5)
REFUSED_TEXT = f'{{"v":1,"node":"{A}",{SETTINGS_TEXT},"wall_s":1795000000.5'
ROUND = Round(3, "run-1", (A, B), SETTINGS, "10.0.0.1", 40001, 0x123, epoch_base=7)


def record_text(state: str, members: str) -> str:
    return (
        f'{{"v":1,"round":3,"run":"run-1","state":"{state}","members":[{members}],{SETTINGS_TEXT},'
        '"master":{"address":"10.0.0.1","port":40001},"job_lease":"0000000000000123",'
        '"epoch_base":7'
    )


FORMED_TEXT = record_text(state="formed", members=f'"{A}","{B}"')

Decode = Callable[[bytes, bytes], Any]
NODES: Decode = lambda key, value: values.decode_place(key, A, value)  # noqa: E731

WRITTEN: dict[str, tuple[Callable[[Any], bytes], Decode, Any, str]] = {
    "presence": (
        values.encode_node,
        NODES,
        NODE,
        NODE_TEXT + ',"lease_ttl":10,"finished":true}',
    ),
    "accusation": (
        values.encode_accusation,
        NODES,
        Accusation(B, "its process is gone", True, 12, 3),
        f'{{"v":1,"accused":{{"by":"{B}","how":"its process is gone","certain":true,'
        '"round_trip_ms":12,"after_ms":3}}',
    ),
    "leader": (
        values.encode_leader,
        values.decode_leader,
        Leader(A, SETTINGS),
        f'{{"v":1,"node":"{A}",{SETTINGS_TEXT}}}',
    ),
    "change": (
        values.encode_change,
        values.decode_change,
        Change("run-1", 3, (A,), {B: "its process is gone"}, 1, {A: "its worker failed"}),
        f'{{"v":1,"run":"run-1","round":3,"waiters":["{A}"],"lost":{{"{B}":"its process is gone"}},'
        f'"unnamed":1,"because":{{"{A}":"its worker failed"}}}}',
    ),
    "drain": (
        values.encode_drain,
        values.decode_drain,
        Drain("root@ops", "maintenance", 41),
        '{"v":1,"by":"root@ops","reason":"maintenance","epoch":41}',
    ),
    "record": (
        values.encode_round,
        values.decode_round,
        replace(
            ROUND,
            expelled=(B,),
            heirs=(B,),
            began_as="run-0",
            lease_ttls_s=Ttls(5, 30),
            domains={"nvl-7": 2, "nvl-8": 1},
        ),
        FORMED_TEXT + f',"expelled":["{B}"],"heirs":["{B}"],"began_as":"run-0",'
        '"lease_ttls":{"shortest":5,"longest":30},"domains":{"nvl-7":2,"nvl-8":1}}',
    ),
    "record of a large world that was put back": (
        values.encode_round,
        values.decode_round,
        replace(ROUND, members=(), epoch_fixed=41, slices=Slices(2, 1, "run-1.5.9")),
        record_text(state="formed", members="")
        + ',"epoch":41,"slices":{"size":2,"count":1,"edition":"run-1.5.9"}}',
    ),
    "closed marker": (
        values.encode_round,
        values.decode_round,
        replace(ROUND, closure=CLOSURE),
        record_text(state="closed", members=f'"{A}","{B}"') + f',"closed":{{{CLOSURE_TEXT}}}}}',
    ),
    "ended runs": (
        values.encode_ended,
        values.decode_ended,
        (Ended("run-1", CLOSURE, 41),),
        f'{{"v":1,"runs":[{{"run":"run-1","epoch":41,{CLOSURE_TEXT}}}]}}',
    ),
    "node that could not join": (
        values.encode_refused,
        values.decode_refused,
        replace(REFUSED, how="its gate said no"),
        REFUSED_TEXT + ',"how":"its gate said no"}',
    ),
    "epoch": (values.encode_epoch, values.decode_epoch, 7, '{"v":1,"base":7}'),
    "slice": (
        values.encode_slice,
        partial(values.decode_slice, size=2),
        {A: 0, B: 1},
        f'{{"v":1,"ranks":{{"{A}":0,"{B}":1}}}}',
    ),
}
READ: dict[str, tuple[Decode, Any, str]] = {
    "presence": (NODES, replace(NODE, lease_ttl_s=0, finished=False), NODE_TEXT + "}"),
    "record": (values.decode_round, ROUND, FORMED_TEXT + "}"),
    "node that could not join": (values.decode_refused, REFUSED, REFUSED_TEXT + "}"),
    "ended runs": (
        values.decode_ended,
        (Ended("run-1", CLOSURE),),
        f'{{"v":1,"runs":[{{"run":"run-1",{CLOSURE_TEXT}}}]}}',
    ),
}
"""As the build before wrote them."""
