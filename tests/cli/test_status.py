"""What ``status`` says of jobs in every state, its exit codes, its JSON, and what it costs etcd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import GateError
from rdzv_etcd.protocol.codec import (
    encode_change,
    encode_node,
    encode_refused,
    encode_slice,
)
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Change, NodeInfo, Refused
from rdzv_etcd.protocol.ranks import cut, slices_for
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import left, lost
from tests.cli.terminal import Terminal
from tests.cli.tools import (
    PREFIX,
    Done,
    Run,
    form_and_lose,
    lease,
    nothing_is_written,
    plant_node,
    plant_round,
    reader,
)
from tests.library.nodes import (
    RemoteNode,
    groups,
    join_all,
    node_options,
    node_settings,
    wait_until,
)
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


@pytest.fixture
def status(cli: Run, etcd_server: EtcdServer) -> Run:
    def run(*words: str) -> Done:
        return cli("status", "--endpoint", etcd_server.endpoint, *words)

    return run


def states(done: Done) -> dict[str, int]:
    counted: dict[str, int] = {}
    for node in done.json["status"]["nodes"]:
        counted[node["state"]] = counted.get(node["state"], 0) + 1
    return counted


def test_a_job_that_works(etcd_server: EtcdServer, job_id: str, status: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        worlds = join_all(nodes)
        done = status(job_id, "--json")
        assert done.code == 0
        told = done.json["status"]
        assert (told["job"], told["state"], told["present"]) == (job_id, "works", 2)
        assert told["epoch"] == worlds[0].epoch
        assert told["round"]["size"] == 2
        assert told["round"]["master"]["port"] == worlds[0].master.port
        assert told["change"] is None
        assert told["closed"] is None
        by_rank = {node["rank"]: node for node in told["nodes"]}
        for world, group in zip(worlds, nodes, strict=True):
            row = by_rank[world.rank]
            assert row["node"] == group.node_id
            assert row["address"] == "127.0.0.1"
            assert row["lease_ttl_s"] == 3
            assert 0 <= row["silent_s"] <= 3
        assert sum(node["leads"] for node in told["nodes"]) == 1
        shown = status(job_id)
        assert shown.code == 0
        assert re.search(
            rf"^{job_id}  WORKS  round 1, 2 nodes \(1 to 2 wanted\)", shown.out, re.MULTILINE
        )
        assert "leader" in shown.out


def test_a_job_that_waits_for_its_first_round(
    etcd_server: EtcdServer, job_id: str, status: Run
) -> None:
    plant_node(etcd_server, job_id, "one~1~a", settings=JobSettings(2, 2))
    done = status(job_id, "--json")
    assert (done.code, states(done)) == (1, {"arrived": 1})
    assert "start a node with" in done.json["status"]["next_step"]
    assert "for round 1: 1 of 2 nodes" in status(job_id).out


def test_a_lost_node_is_named_with_how_it_was_lost(
    etcd_server: EtcdServer, job_id: str, status: Run
) -> None:
    options = node_options(etcd_server, job_id, "2")
    with groups(node_settings(etcd_server, job_id, "2"), 1) as (node,):
        with RemoteNode(options) as other:
            lost_id = form_and_lose(node, other)
        wait_until("the world is over", lambda: node.waiting_count() > 0)
        done = status(job_id, "--json")
        assert done.code == 1
        (lost,) = (each for each in done.json["status"]["nodes"] if each["state"] == "lost")
        assert lost["node"] == lost_id
        assert lost["why"]
        assert done.json["status"]["change"]["lost"] == {lost_id: lost["why"]}
        shown = status(job_id).out
        assert "round 1 is over: " in shown
        assert "LOST" in shown
        assert "next: start" in shown


def test_a_node_that_other_settings_keep_out_is_named(
    etcd_server: EtcdServer, job_id: str, status: Run, act: Run
) -> None:
    key, put = JobKeys(PREFIX, job_id).refused, etcd_server.gateway.put
    joined_us = int((time.time() - 5) * 1e6)
    plant_node(etcd_server, job_id, "one~1~a", settings=JobSettings(2, 2), clock_us=joined_us)
    refused = encode_refused(Refused("elsewhere~7~a", JobSettings(3, 3), time.time() - 60))
    put(key, refused, lease(etcd_server))
    done = status(job_id, "--json")
    fields = done.json["status"]["refused"]
    assert (done.code, fields["node"], fields["min_nodes"]) == (1, "elsewhere~7~a", 3)
    out = status(job_id).out
    assert "the first of them joined " in out
    started = "it was started with min_nodes=3, max_nodes=3"
    assert re.search(rf"elsewhere could not join \(1 min.* ago\): {started}", out)
    doctor = act("doctor", job_id)
    assert "warn  elsewhere could not join" in doctor.out
    put(key, refused)  # it would stay
    assert "could not join" not in status(job_id).out


def test_a_node_that_does_not_pass_its_gate_is_named(
    etcd_server: EtcdServer, job_id: str, status: Run, act: Run
) -> None:
    settings = node_settings(etcd_server, job_id, "1", gate_command="sh -c 'echo no GPU; exit 3'")
    help_ = "fix what its gate checks, or keep that host out of the job"
    with groups(settings, 1) as (node,):
        host = node.node_id.split("~", maxsplit=1)[0]
        with pytest.raises(GateError):
            node.join()
        done = status(job_id)
        assert done.code == 2  # no job is there
        line = r" could not join \(.*\): its gate .*sh -c .* ended with exit code 3: no GPU"
        assert re.search(host + line, done.out)
        assert f"next: {help_}" in done.out
        refused = status(job_id, "--json").json["status"]["refused"]
        assert refused["node"] == node.node_id
        assert re.fullmatch(r"its gate .*sh -c .* ended with exit code 3: no GPU", refused["why"])
        doctor = act("doctor", job_id)
        assert re.search(f"warn  {host}{line}", doctor.out)
        assert f"-> {help_}" in doctor.out
    passing = node_settings(etcd_server, job_id, "1", gate_command="true")
    with groups(passing, 1) as nodes:
        join_all(nodes)
        assert "could not join" not in status(job_id).out


def test_a_job_that_was_closed(etcd_server: EtcdServer, job_id: str, status: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1", closed_ttl=60), 1) as (node,):
        join_all([node])
        node.finish("all done")
        done = status(job_id, "--json")
        assert done.code == 2
        assert done.json["status"]["closed"]["reason"] == "all done"
        assert done.json["status"]["closed"]["succeeded"] is True
    shown = status(job_id)
    assert shown.code == 2
    assert "CLOSED  finished: closed by" in shown.out


def test_a_job_whose_nodes_all_died_is_not_unknown(
    etcd_server: EtcdServer, job_id: str, status: Run, act: Run
) -> None:
    """`history` says the same. Of a job whose leases have run out its audits are left."""
    audit = b'{"v": 1, "round": 1}'
    etcd_server.gateway.put(JobKeys(PREFIX, job_id).audit(1, "run"), audit, lease(etcd_server))
    done = status(job_id)
    assert done.code == 2
    assert "GONE  all its nodes died or left, and none of them closed it" in done.out
    assert f"next: see rdzv-etcd history {job_id}" in done.out
    assert status(job_id, "--json").json["status"]["state"] == "gone"
    history = act("history", job_id)
    assert history.code == 0
    assert history.out.splitlines()[-1] == "all its nodes died or left, and none of them closed it"


def test_who_left_is_not_called_lost(etcd_server: EtcdServer, job_id: str, status: Run) -> None:
    members = [f"{name}~{pid}~x" for pid, name in enumerate(("one", "two", "three"), 1)]
    plant_round(etcd_server, job_id, members)
    plant_node(etcd_server, job_id, members[0])
    change = Change("run", 1, (), {members[1]: "left: drained: its fan", members[2]: "evicted"})
    key = JobKeys(PREFIX, job_id).change
    etcd_server.gateway.put(key, encode_change(change), lease(etcd_server))
    told = status(job_id, "--json").json["status"]
    assert told["change"]["lost"] == {members[2]: "evicted"}
    assert told["change"]["left"] == {members[1]: "drained: its fan"}
    rows = {row["node"]: (row["state"], row["why"]) for row in told["nodes"]}
    assert rows[members[1]] == ("left", "drained: its fan")
    assert rows[members[2]] == ("lost", "evicted")
    assert (
        f"round 1 is over: {lost('three', 'evicted')}; {left('two', 'drained: its fan')}"
        in status(job_id).out
    )


def test_an_etcd_that_cannot_be_asked(cli: Run, job_id: str) -> None:
    words = ("status", job_id, "--endpoint", f"127.0.0.1:{free_port()}", "--conf=connect_timeout=1")
    done = cli(*words)
    assert done.code == 3
    assert "connection refused" in done.err
    done = cli(*words, "--json")
    assert done.json["error"]["exit_code"] == 3


def test_all_jobs_of_a_prefix(
    fresh_etcd: Callable[..., EtcdServer], cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_etcd()
    monkeypatch.setenv("PET_RDZV_ENDPOINT", server.endpoint)  # as torchrun takes it
    assert "no job under /rdzv_etcd" in cli("status").out
    ids = ["a/b", "b c", "c\u20ac", "plain"]
    for job in ids:
        plant_node(server, job, f"{len(job)}~1~a")
    server.gateway.put(b"/rdzv_etcd/stray", b"no job's")
    done = cli("status", "--json")
    assert done.code == 0
    assert sorted(job["job"] for job in done.json["jobs"]["jobs"]) == sorted(ids)
    assert {job["state"] for job in done.json["jobs"]["jobs"]} == {"waits"}
    assert len(cli("status").out.splitlines()) == 1 + len(ids)
    monkeypatch.setenv("PET_RDZV_ID", "a/b")
    assert cli("status", "--json").json["status"]["job"] == "a/b"


@pytest.mark.parametrize("command", ["status", "history", "watch"])
def test_reading_needs_no_right_to_write(
    auth_etcd: EtcdServer,
    job_id: str,
    cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    environ = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
    settings = node_settings(auth_etcd, job_id, "1", environ=environ)
    with groups(settings, 1) as nodes, reader(auth_etcd, job_id, monkeypatch):
        join_all(nodes)
        with nothing_is_written(auth_etcd, job_id):
            if command == "watch":
                with Terminal(command, job_id, "--endpoint", auth_etcd.endpoint) as terminal:
                    terminal.wait_for("WORKS")
                    terminal.press(b"\x03")
                    assert terminal.end() == 130
            else:
                done = cli(command, job_id, "--json", "--endpoint", auth_etcd.endpoint)
                assert done.code == 0, done
        listed = cli("status", "--json", "--endpoint", auth_etcd.endpoint)
        assert job_id in {job["job"] for job in listed.json["jobs"]["jobs"]}


# --- a large job ----------------------------------------------------------------------------------

_NODES = 3000


@pytest.fixture
def large_etcd(fresh_etcd: Callable[..., EtcdServer], job_id: str) -> EtcdServer:
    """An etcd with a world of 3,000 nodes, as they would have written it."""
    server = fresh_etcd()
    ids = [f"node{number:04}~{number + 1}~{number:08x}" for number in range(_NODES)]
    settings = node_settings(server, job_id, f"1:{_NODES}").job
    slices = slices_for(_NODES, 128, "edition")
    assert slices is not None
    _, job_lease = plant_round(server, job_id, (), settings=settings, slices=slices)
    keys, session = JobKeys(PREFIX, job_id), lease(server)
    for index, ranks in enumerate(cut(ids, slices)):
        server.gateway.put(keys.slice(1, slices.edition, index), encode_slice(ranks), job_lease)
    for number, node_id in enumerate(ids):
        address, data = f"10.0.{number // 250}.{number % 250}", {"gpus": 8, "serial": "x" * 100}
        info = NodeInfo(node_id, address, 4711, 1, settings, data=data)
        server.gateway.put(keys.node(node_id), encode_node(info), session)
    return server


@pytest.mark.slow
def test_a_large_job_is_told_in_numbers_and_costs_etcd_little(
    large_etcd: EtcdServer, job_id: str, cli: Run
) -> None:
    words = ("status", job_id, "--json", "--endpoint", large_etcd.endpoint)
    requests, sent = _load(large_etcd)
    done = cli(*words)
    asked, got = _load(large_etcd)
    assert (done.code, done.json["status"]["nodes"]) == (0, None)
    assert done.json["status"]["present"] == _NODES
    assert done.json["status"]["round"]["size"] == _NODES
    assert asked - requests <= 6
    assert got - sent < 20_000
    done = cli(*words, "--all")
    every, all_of_it = _load(large_etcd)
    assert len(done.json["status"]["nodes"]) == _NODES
    assert {node["state"] for node in done.json["status"]["nodes"]} == {"works"}
    assert every - asked <= 30
    # A page holds 256 keys at most.
    assert (all_of_it - got) / (every - asked) < 256 * 600


def _load(server: EtcdServer) -> tuple[float, float]:
    metrics = server.metrics()
    sent = metrics.total("etcd_network_client_grpc_sent_bytes_total")
    return sum(metrics.requests().values()), sent
