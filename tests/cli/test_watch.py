"""What ``watch`` shows, on a real terminal and in a pipe, while things happen in a real job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from rdzv_etcd.cli.watch import event_fields, lines_of
from rdzv_etcd.names import Names
from rdzv_etcd.protocol.events import Joined, Missed, NodeLeft, NodeLost
from tests.cli.terminal import Terminal
from tests.cli.test_hostile import EVIL, is_harmless
from tests.cli.tools import LIMIT_S, form_and_lose
from tests.library.nodes import (
    RemoteNode,
    groups,
    join_all,
    node_options,
    node_settings,
    wait_until,
)
from tests.support.servers import EtcdServer


def test_on_a_terminal_a_table_follows_what_happens(etcd_server: EtcdServer, job_id: str) -> None:
    settings = node_settings(etcd_server, job_id, "1:3")
    words = ("watch", job_id, "--endpoint", etcd_server.endpoint)
    before = etcd_server.leases()
    with Terminal(*words) as terminal:
        terminal.wait_for("UNKNOWN")
        assert etcd_server.leases() <= before
        with groups(settings, 3) as nodes:
            join_all(nodes)
            terminal.wait_for(r"round 1: 3 nodes")
            terminal.wait_for(rf"{job_id}  WORKS  round 1, 3 nodes \(1 to 3 wanted\)")
            terminal.wait_for(r"NODE +RANK +STATE")
            so_far = len(terminal.text)
            nodes[0].leave("needed elsewhere")
            terminal.wait_for(r"\d\d:\d\d:\d\d  .*left \(needed elsewhere\)", after=so_far)
            terminal.wait_for(r"WAITS  for round 2", after=so_far)
            nodes[1].finish("all done")
            terminal.wait_for(r"finished the job: all done", after=so_far)
            terminal.wait_for("CLOSED", after=so_far)
        terminal.press(b"\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text


def test_in_a_pipe_each_event_is_a_json_object(etcd_server: EtcdServer, job_id: str) -> None:
    command = [sys.executable, "-m", "rdzv_etcd", "watch", job_id, "--json", "--until-ended"]
    with subprocess.Popen(
        [*command, "--endpoint", etcd_server.endpoint], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["version"], first["event"]["type"]) == (1, "snapshot")
        assert first["event"]["stage"] == "absent"
        options = node_options(etcd_server, job_id, "1:2")
        with groups(node_settings(etcd_server, job_id, "1:2"), 1) as (node,):
            with RemoteNode(options) as other:
                lost_id = form_and_lose(node, other)
            wait_until("its world is over", lambda: node.waiting_count() > 0)
            node.join()
            node.fail("enough")
        rest, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
    events = [json.loads(line)["event"] for line in rest.splitlines()]
    kinds = [event["type"] for event in events]
    assert kinds.count("world_formed") == 2
    formed = [event for event in events if event["type"] == "world_formed"]
    assert [event["size"] for event in formed] == [2, 1]
    (lost,) = (event for event in events if event["type"] == "node_lost")
    assert lost["node"] == lost_id
    (over,) = (event for event in events if event["type"] == "world_over" and event["round"] == 1)
    assert over["change"]["type"] == "lost"
    (ended,) = (event for event in events if event["type"] == "job_ended")
    assert (ended["succeeded"], ended["reason"]) == (False, "enough")


@pytest.mark.slow
def test_an_etcd_that_goes_away_is_told_and_outlived(
    fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    server = fresh_etcd()
    with Terminal("watch", job_id, "--endpoint", server.endpoint) as terminal:
        terminal.wait_for("UNKNOWN")
        server.pause()
        terminal.wait_for("not up to date: etcd does not answer within 5 s")
        server.resume()
        terminal.wait_for("up to date again")
        with groups(node_settings(server, job_id, "1"), 1) as nodes:
            join_all(nodes)
            terminal.wait_for("round 1: 1 node,")


@pytest.mark.parametrize(
    "event",
    [Joined(EVIL), NodeLost(EVIL, EVIL, 0.05), NodeLeft(EVIL, "m" * 1_000_000), Missed(7)],
    ids=lambda event: type(event).__name__,
)
def test_what_others_wrote_is_harmless_in_an_event(event: Joined) -> None:
    assert is_harmless("\n".join(lines_of(event, Names())))
    json.dumps(event_fields(event))
