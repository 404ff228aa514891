"""Commands that change a job: they ask, they refuse beside living nodes, and they do it at once."""

from __future__ import annotations

import os
import signal

import pytest

from rdzv_etcd.cli.evict import Eviction, judge
from rdzv_etcd.errors import JobClosedError
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Change, Control, Round
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import Failed, Finished
from tests.cli.terminal import Terminal
from tests.cli.tools import (
    PREFIX,
    Done,
    Run,
    form_and_lose,
    nothing_is_written,
    plant_node,
    plant_round,
)
from tests.library.nodes import (
    RemoteNode,
    groups,
    join_all,
    node_options,
    node_settings,
    wait_until,
)
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


@pytest.mark.parametrize("words", [("close",), ("drain", "one"), ("evict", "one")])
def test_nothing_is_changed_where_nobody_can_be_asked(
    etcd_server: EtcdServer, job_id: str, act: Run, words: tuple[str, ...]
) -> None:
    keys = JobKeys(PREFIX, job_id)
    command, *more = words
    plant_round(etcd_server, job_id, ["one~1~a"])
    plant_node(etcd_server, job_id, "one~1~a")
    before = etcd_server.keys(keys.root)
    done = act(command, job_id, *more)
    assert (done.code, "--yes" in done.err) == (1, True), done
    assert etcd_server.keys(keys.root) == before


def test_a_question_on_a_terminal_is_answered_there(etcd_server: EtcdServer, job_id: str) -> None:
    keys = JobKeys(PREFIX, job_id)
    plant_round(etcd_server, job_id, ["one~1~a"])
    before = etcd_server.keys(keys.root)
    for answer, code in ((b"\x03", 130), (b"n\n", 1), (b"y\n", 0)):
        assert etcd_server.keys(keys.root) == before
        with Terminal("close", job_id, "--endpoint", etcd_server.endpoint) as terminal:
            terminal.wait_for(r"Close job .*\[y/N\]")
            terminal.press(answer)
            if code == 130:
                terminal.wait_for(r"\^C")
                terminal.press(b"x\n")  # not an answer; who begins to read now missed the signal
            assert terminal.end(60.0) == code
    assert "is closed" in terminal.text
    assert etcd_server.keys(keys.root) != before


# --- close ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("succeeded", [False, True])
def test_a_closed_job_s_members_are_told_by_whom_and_why(
    etcd_server: EtcdServer, job_id: str, act: Run, succeeded: bool
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        worlds = join_all(nodes)
        words = ["--succeeded"] if succeeded else []
        done = act("close", job_id, "--yes", "--json", "--reason", "enough", *words)
        assert done.code == 0, done
        assert done.json["closed"]["reason"] == "enough"
        for world in worlds:
            assert world.wait_over(60)
            change = world.change
            assert isinstance(change, Finished if succeeded else Failed)
            assert change.reason == "enough"
        with pytest.raises(JobClosedError, match="enough"):
            nodes[0].join()
        again = act("close", job_id, "--yes")
        assert again.code == 1
        assert "enough" in again.err
    assert act("history", job_id, "--json").json["history"]["ended"][-1]["reason"] == "enough"


def test_what_has_no_round_cannot_be_closed(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    plant_node(etcd_server, job_id, "one~1~a")
    with nothing_is_written(etcd_server, job_id):
        done = act("close", job_id, "--yes")
    assert (done.code, "no formed round" in done.err) == (1, True)


def test_all_of_it_works_as_a_user_of_the_prefix_only(
    auth_etcd: EtcdServer, job_id: str, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokens are valid for two seconds."""
    environ = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def act(*words: str) -> Done:
        return cli(*words, "--yes", "--json", "--endpoint", auth_etcd.endpoint)

    with groups(node_settings(auth_etcd, job_id, "2", environ=environ), 2) as nodes:
        worlds = join_all(nodes)
        assert act("evict", job_id, nodes[1].node_id).json["evict"]["fate"] == "answered"
        assert act("drain", job_id, nodes[1].node_id).json["drain"]["fate"] == "asked"
        assert act("close", job_id, "--succeeded").code == 0
        assert all(world.wait_over(60) for world in worlds)


# --- evict ----------------------------------------------------------------------------------------


def test_a_living_node_answers_and_nothing_has_happened(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        worlds = join_all(nodes)
        before = etcd_server.leases()
        done = act("evict", job_id, nodes[1].node_id, "--yes", "--json")
        assert (done.code, done.json["evict"]["fate"]) == (1, "answered")
        assert not any(world.over for world in worlds)
        assert etcd_server.leases() <= before


def test_a_stopped_node_is_lost_at_once(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    """Its lease would keep it for half an hour."""
    options = node_options(etcd_server, job_id, "1:2", lease_ttl=1800, peer_links=0)
    settings = node_settings(etcd_server, job_id, "1:2", lease_ttl=1800, peer_links=0)
    with groups(settings, 1) as (node,), RemoteNode(options) as other:
        lost_id = form_and_lose(node, other)
        words = ("evict", job_id, lost_id, "--yes", "--json", "--reason", "no power")
        done = act(*words, "--certain")
        assert (done.code, done.json["evict"]["fate"]) == (0, "lost")
        change = act("status", job_id, "--json").json["status"]["change"]
        assert "no power" in change["lost"][lost_id]


def test_a_node_that_does_not_answer_is_not_lost_without_a_leader(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    plant_round(etcd_server, job_id, ["one~1~a", "two~2~b"])
    plant_node(etcd_server, job_id, "one~1~a")
    done = act("evict", job_id, "one", "--yes", "--json", "--wait=0.5")
    assert (done.code, done.json["evict"]["fate"]) == (1, "open")
    done = act("evict", job_id, "one", "--yes")
    assert (done.code, "no node 'one'" in done.err) == (1, True)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGTERM,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_an_accusation_goes_with_the_command_however_that_is_ended(
    etcd_server: EtcdServer, job_id: str, how: signal.Signals
) -> None:
    plant_round(etcd_server, job_id, ["one~1~a", "two~2~b"])
    plant_node(etcd_server, job_id, "one~1~a")
    key = JobKeys(PREFIX, job_id).node("one~1~a")
    words = ("evict", job_id, "one", "--yes", "--wait=100", "--reason=dead")
    before = etcd_server.leases()
    with Terminal(*words, "--endpoint", etcd_server.endpoint) as terminal:
        wait_until("it is accused", lambda: b"dead" in etcd_server.keys(key).get(key, b""))
        (granted,) = etcd_server.leases() - before
        lasts = etcd_server.gateway.call("/v3/lease/timetolive", {"ID": granted})
        assert int(lasts["grantedTTL"]) > 100  # it stands for as long as its outcome is waited for
        os.kill(terminal.pid, how)
        assert terminal.end() == 130
    assert b"dead" not in etcd_server.keys(key).get(key, b"")


def test_what_became_of_an_accused_node() -> None:
    world = Round(3, "run", ("a", "b"), JobSettings(1, 2), "h", 1, 1)
    control = Control(10, world, 5)
    assert judge(control, "b", 8) is Eviction.OPEN
    assert judge(control, "c", 8) is Eviction.GONE
    assert judge(Control(10), "b", 8) is Eviction.GONE
    change = Change("run", 3, (), {"b": "evicted"})
    assert judge(Control(10, world, 5, change=change, change_revision=9), "b", 8) is Eviction.LOST
    assert judge(Control(10, world, 5, change=change, change_revision=7), "a", 8) is Eviction.GONE
    assert judge(Control(10, world, 9), "b", 8) is Eviction.LOST
