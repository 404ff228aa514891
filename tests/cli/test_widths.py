"""Tables of usual widths: no column loses its text, and no line is too long."""

from __future__ import annotations

import json
import time

import pytest

from rdzv_etcd.cli.history import when
from rdzv_etcd.protocol.codec import encode_accusation, encode_change, encode_drain
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Accusation, Change, Drain
from rdzv_etcd.world_change import lost
from tests.cli.terminal import Terminal
from tests.cli.tools import PREFIX, Run, lease, plant_node, plant_round
from tests.support.servers import EtcdServer

COLUMNS = [80, 100, 140]
HOW = "its process exited (its host refuses the connection; noticed by gpu-05 within 3 ms)"
OTHER = "its host is silent, and nobody has heard of it for a good while by now"
REASON = "host maintenance, as it was announced for tonight"


def shown(act: Run, monkeypatch: pytest.MonkeyPatch, columns: int, *words: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    return act(*words).out.splitlines()


def cells(line: str) -> list[str]:
    return [each.strip() for each in line.split("  ") if each.strip()]


@pytest.mark.parametrize("columns", COLUMNS)
def test_status_shows_each_node_with_its_rank_and_state(
    etcd_server: EtcdServer, job_id: str, act: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    keys, put = JobKeys(PREFIX, job_id), etcd_server.gateway.put
    names = ["trainer-worker-a", "trainer-worker-b", "trainer-worker-c"]
    members = [f"{name}~190{rank}~x" for rank, name in enumerate(names)]
    for node_id in members[:2]:
        plant_node(etcd_server, job_id, node_id)
    lost = encode_accusation(Accusation(members[0], HOW, is_certain=True))
    put(keys.node(members[2]), lost, lease(etcd_server))
    plant_round(etcd_server, job_id, members)
    put(keys.drain(members[1]), encode_drain(Drain("me", REASON)), lease(etcd_server))

    def check() -> None:
        lines = shown(act, monkeypatch, columns, "status", job_id)
        (head,) = (at for at, line in enumerate(lines) if line.startswith("NODE"))
        assert cells(lines[head])[:6] == ["NODE", "RANK", "STATE", "ADDRESS", "LAST HEARD", "PID"]
        table = [line for line in lines[head + 1 :] if line and not line.startswith("next: ")]
        assert all(len(line) <= columns for line in table), table
        rows = {cells(line)[0]: cells(line) for line in table if line.startswith("trainer")}
        assert [rows[name][1] for name in names] == ["0", "1", "2"]
        assert rows[names[2]][2:6] == ["LOST", "-", "-", "1902"]
        assert rows[names[1]][3] == "192.0.2.7"
        assert rows[names[1]][5] == "1901"
        text = " ".join(" ".join(table).split())
        assert HOW in text
        assert f"being drained: drained by me: {REASON}" in text

    check()
    change = Change("run", 1, (), {members[2]: HOW})
    put(keys.change, encode_change(change), lease(etcd_server))
    check()


@pytest.mark.parametrize("columns", COLUMNS)
def test_history_shows_when_each_round_was_formed(
    etcd_server: EtcdServer, job_id: str, act: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    keys = JobKeys(PREFIX, job_id)
    node = "trainer-worker-3~12~x"
    for number in (7, 8):
        audit = {
            "v": 1,
            "round": number,
            "wall_s": 1e9 + number,
            "size": 12,
            "open_s": 0.13,
            "because": "all surviving members rejoined",
            "last_arrival": node,
            "change": {"lost": {node: OTHER}, "waiters": []},
        }
        value = json.dumps(audit).encode()
        etcd_server.gateway.put(keys.audit(number, "run"), value, lease(etcd_server))
    lines = shown(act, monkeypatch, columns, "history", job_id)
    assert cells(lines[0])[:5] == ["ROUND", "WHEN", "NODES", "FORMED IN", "CLOSED BECAUSE"]
    assert all(len(line) <= columns for line in lines), lines
    for number in (7, 8):
        (row,) = (cells(line) for line in lines if line.startswith(f"{number} "))
        at = when(1e9 + number, time.time())
        assert row[:5] == [str(number), at, "12", "0.13 s", "all surviving members rejoined"]
    text = " ".join(" ".join(lines).split())
    assert text.count(lost("trainer-worker-3", OTHER)) == 2
    assert text.count("trainer-worker-3") == 4


def test_watch_shows_them_on_a_narrow_terminal(etcd_server: EtcdServer, job_id: str) -> None:
    member = "trainer-worker-a~1900~x"
    plant_round(etcd_server, job_id, [member, "trainer-worker-b~1901~x"])
    plant_node(etcd_server, job_id, member)
    with Terminal("watch", job_id, "--endpoint", etcd_server.endpoint, columns=80) as terminal:
        terminal.wait_for(r"NODE +RANK +STATE +ADDRESS +LAST HEARD +PID")
        terminal.wait_for(r"trainer-worker-b +1 +LOST +- +- +1901")
