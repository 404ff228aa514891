"""What others wrote under a job's keys reaches no terminal as they wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rdzv_etcd.protocol.codec import encode_drain, encode_refused
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Closure, Drain, Refused
from rdzv_etcd.settings import JobSettings
from tests.cli.tools import PREFIX, Run, lease, plant_node, plant_round
from tests.support.servers import EtcdServer

EVIL = "[bold red]x[/bold red] :warning: \x1b[2J\x1b]0;mine\x07\r\n\u202e fin"
MEGABYTE = "m" * 1_000_000


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text) and len(text) < 20_000


@pytest.mark.parametrize("command", ["status", "history", "doctor"])
def test_names_reasons_and_values_are_shown_as_text(
    etcd_server: EtcdServer, job_id: str, act: Run, command: str
) -> None:
    keys, put = JobKeys(PREFIX, job_id), etcd_server.gateway.put
    plant_node(etcd_server, job_id, "[red]one[/red]~1~a", leaving=EVIL)
    closure = Closure("[blink]who[/blink]", EVIL, False, 0.0)
    plant_round(etcd_server, job_id, ["[red]one[/red]~1~a"], closure=closure)
    stranger = lease(etcd_server)
    put(keys.nodes.start + EVIL.encode(), b"\xff\x00" + EVIL.encode(), stranger)
    put(keys.node("large~2~b"), MEGABYTE.encode(), stranger)
    audit = {"v": 1, "round": 1, "because": EVIL, "last_arrival": EVIL, "size": 10**400}
    audit |= {"change": {"lost": {EVIL: EVIL}, "waiters": [EVIL, 7]}, "wall_s": "soon"}
    audit |= {"came_back": {EVIL: EVIL, "~": 7}}
    put(keys.audit(1, "run"), json.dumps(audit).encode(), stranger)
    put(keys.audit(2, "run"), MEGABYTE.encode(), stranger)
    put(keys.audit(3, "run"), b"[" * 100_000, stranger)
    put(keys.drain("[red]one[/red]~1~a"), encode_drain(Drain("[b]who[/b]", EVIL)), stranger)
    out = encode_refused(Refused("[i]out[/i]~9~z", JobSettings(7, 7), -1e300, EVIL))
    put(keys.refused, out, stranger)
    done = act(command, job_id)
    assert is_harmless(done.out), done.out
    assert done.err == ""
    assert "[red]" in done.out or "[b" in done.out  # no markup was taken out of it
    told = act(command, job_id, "--json")
    assert told.out.isascii()
    assert told.json
    if command == "status":
        assert told.json["status"]["refused"]["why"] == EVIL


def test_a_job_s_name_is_text_as_well(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    name = f"{job_id}{EVIL}"
    plant_node(etcd_server, name, "one~1~a")
    done = act("status")
    assert is_harmless(done.out)
    assert job_id in done.out
    assert act("status", name, "--json").code == 1


@pytest.mark.parametrize("value", [b"", b"null", b"{}", b"\xff", b"[" * 100_000, b"x" * 1_000_000])
@pytest.mark.parametrize("key", ["round", "leader", "change", "ended", "epoch"])
def test_a_control_key_that_cannot_be_read_is_named(
    etcd_server: EtcdServer, job_id: str, act: Run, key: str, value: bytes
) -> None:
    etcd_server.gateway.put(getattr(JobKeys(PREFIX, job_id), key), value)
    done = act("status", job_id)
    assert done.code == 2
    assert f"ctl/{key}" in done.out
    assert is_harmless(done.out)
    listed = act("status")
    assert listed.code == 0
    history = act("history", job_id)
    assert (history.code, f"ctl/{key}" in history.err) == (1, True)


def test_keys_that_are_no_job_s_are_passed_over(
    fresh_etcd: Callable[..., EtcdServer], cli: Run
) -> None:
    server = fresh_etcd()
    strange = [b"%FF", b"a b", b"", b"\xff\xfe", b"%2", b"%6a", b"x" * 100_000]
    for segment in strange:
        server.gateway.put(b"/rdzv_etcd/" + segment + b"/ctl/round", b"x")
    server.gateway.put(b"/rdzv_etcd/", b"x")
    plant_node(server, "%FF", "one~1~a")
    done = cli("status", "--json", "--endpoint", server.endpoint)
    assert {job["job"] for job in done.json["jobs"]["jobs"]} == {"%FF", "x" * 100_000}
    assert is_harmless(cli("status", "--endpoint", server.endpoint).out)
