"""What ``history`` says of the rounds of a real job."""

from __future__ import annotations

import json
import re
import time
from functools import partial

from rdzv_etcd.cli.history import when
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.world_change import left, rejoined
from tests.cli.tools import PREFIX, Run, lease, plant_node
from tests.library.nodes import at_once, groups, join_all, node_settings
from tests.support.servers import EtcdServer


def test_each_round_is_told_with_its_time(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    began_s = time.time()
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as (one, two):
        join_all([one, two])
        two.leave("needed elsewhere")
        one.join()
        done = act("history", job_id, "--json")
        ended_s = time.time()
        first, second = done.json["history"]["rounds"]
        assert began_s - 0.001 <= first["wall_s"] <= second["wall_s"] <= ended_s + 0.001
        assert (second["lost"], second["left"]) == ({}, {two.node_id: "needed elsewhere"})
        shown = act("history", job_id).out
    assert re.search(r"^ROUND +WHEN +NODES", shown, re.MULTILINE)
    for number, note, size in ((1, first, 2), (2, second, 1)):
        at = when(note["wall_s"], ended_s)
        assert re.search(rf"^{number} +{at} +{size} ", shown, re.MULTILINE), shown


def test_a_drained_node_is_not_a_host_to_look_at(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    keys = JobKeys(PREFIX, job_id)
    for number, how in [(each, "left: drained: updates") for each in range(2, 12)]:
        audit = {"v": 1, "round": number, "change": {"lost": {"gpu-7~1~a": how}, "waiters": []}}
        value = json.dumps(audit).encode()
        etcd_server.gateway.put(keys.audit(number, "run"), value, lease(etcd_server))
    out = act("history", job_id).out
    assert left("gpu-7", "drained: updates") in out
    assert "lost" not in out


def test_before_the_first_round_it_says_what_status_does(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    done = act("history", job_id)
    assert (done.code, "nothing is recorded for it" in done.out) == (2, True)
    plant_node(etcd_server, job_id, "one~1~a")
    done = act("history", job_id)
    assert (done.code, "waits for round 1: 1 node (1 to 2 wanted)" in done.out) == (0, True)
    assert act("history", job_id, "--json").json["history"]["rounds"] == []


def test_why_members_came_back_is_told_and_outlives_the_job(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    why = "worker of rank 1 was killed by SIGSEGV\x1b[2J"
    with groups(node_settings(etcd_server, job_id, "2", ended_ttl=600), 2) as (one, two):
        join_all([one, two])
        for _ in range(5):
            at_once([one.join, partial(two.join, because=why)])
        one.finish("done")
    told = act("history", job_id, "--json").json["history"]
    assert [each["round"] for each in told["rounds"]] == [1, 2, 3, 4, 5, 6]
    shown = why.replace("\x1b", "\\x1b")
    assert [each["back_because"] for each in told["rounds"][1:]] == [{two.node_id: shown}] * 5
    assert told["ended"][0]["reason"] == "done"
    out = " ".join(act("history", job_id).out.split())
    assert rejoined("", shown) in out


def test_a_time_has_its_date_unless_it_is_today_s() -> None:
    noon = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
    assert when(noon, noon + 3600) == "12:00:00"
    assert when(noon, noon + 86400) == "2026-03-01 12:00:00"
    assert when(1e15 - 1, noon)
