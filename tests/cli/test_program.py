"""The program itself: without its extra, with wrong words, in pipes, from the environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd.cli.options import JobTarget
from rdzv_etcd.embedded.port import own_addresses
from tests.cli.tools import (
    LIMIT_S,
    PROGRAM,
    Run,
    plant_node,
    plant_round,
    run_alone,
    run_python,
    site_without,
)
from tests.support.processes import free_port, run
from tests.support.servers import EtcdServer, find_binaries


@pytest.mark.parametrize(
    "missing",
    ["click", "rich"],
)
def test_without_its_extra_it_says_at_once_what_to_install(tmp_path: Path, missing: str) -> None:
    packages = site_without(tmp_path / "packages", missing)
    done = run_python("-I", "-S", "-c", PROGRAM, str(packages), "status")
    error = f"rdzv-etcd needs the package {missing}: pip install 'rdzv-etcd[cli]'\n"
    assert (done.code, done.out, done.err) == (2, "", error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "No such command"),
        (("status", "--nonsense"), "No such option"),
        (("status", "j", "--conf=lease_ttl=soon"), "lease_ttl"),
        (("status", "j", "--conf=password=x"), "RDZV_ETCD_PASSWORD"),
        (("status", "j", "--conf=nothing"), "NAME=VALUE"),
        (("status", "j", "--endpoint=me:sesame@host"), "RDZV_ETCD_USER"),
        (("doctor", "--nnodes=many"), "--nnodes"),
        (("history",), "name a job"),
        (("evict", "j"), "NODE"),
        (("evict", "j", "n", "--wait=nan"), "not a number of seconds"),
        (("evict", "j", "n", "--wait=inf"), "is not in the range"),
        (("drain", "j", "n", "--wait=nan"), "not a number of seconds"),
        (("drain", "j", "n", "--wait=1e9"), "is not in the range"),
        (("doctor", "--listen=NaN"), "not a number of seconds"),
        (("doctor", "--listen=-1"), "is not in the range"),
        (("serve", "--endpoint=https://127.0.0.1:1"), "https only with a secret"),
        (("serve", "--endpoint=192.0.2.1:1"), "not an address of this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words_end_it_with_64(words: tuple[str, ...], said: str, cli: Run) -> None:
    done = cli(*words)
    assert done.code == 64
    assert said in done.err
    assert "sesame" not in done.err
    assert "Traceback" not in done.err
    told = cli(*words, "--json")
    assert told.code == 64
    assert told.json["error"]["exit_code"] == 64


def test_what_an_agent_s_environment_says_is_enough(etcd_server: EtcdServer, job_id: str) -> None:
    plant_node(etcd_server, job_id, "one~1~a")
    environ = {
        "PET_RDZV_ENDPOINT": etcd_server.endpoint,
        "PET_RDZV_ID": job_id,
        "PET_RDZV_CONF": "lease_ttl=4,rank_key=env:NOT_SET_HERE,node_unit=2,embed=1,timeout=900",
    }
    done = run_alone("status", "--json", environ=environ)
    assert done.code == 1, done
    assert done.json["status"]["present"] == 1


def test_options_of_one_node_are_no_matter() -> None:
    target = JobTarget("h", "node_unit=4,rank_key=env:NOT_SET_HERE", "")
    assert target.settings("j", "4:8").job.node_unit == 4
    target = JobTarget("h", "segment_size=4,domain_key=env:NOT_SET_HERE", "")
    assert target.settings("j", "4:8").job.segment_size == 4
    assert target.settings("j").job_id == "j"


@pytest.mark.parametrize("name", ["connect_timeout", "request_timeout"])
def test_nobody_waits_as_long_for_an_answer_as_an_agent_may(name: str) -> None:
    def limit_s(given_s: int) -> float:
        connection = JobTarget("h", f"{name}={given_s}", "").settings().connection
        return float(getattr(connection, f"{name}_s"))

    assert (limit_s(600), limit_s(2)) == (10, 2)


def test_an_agent_s_patience_is_not_needed_to_be_told_that_there_is_no_etcd() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    done = run_alone("status", "--conf=connect_timeout=600", "--endpoint", endpoint, limit_s=60)
    assert done.code == 3
    assert "within 10 s" in done.err


@pytest.mark.parametrize("words", [("status",), ("status", "--json")])
def test_a_reader_that_has_gone_is_not_taken_for_a_result(
    etcd_server: EtcdServer, words: tuple[str, ...]
) -> None:
    """1 would mean that a job waits."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rdzv_etcd", *words, "--endpoint", etcd_server.endpoint]
    try:
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=LIMIT_S
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


_CLOSED = "rdzv-etcd: cannot be written: standard output is closed\n"
_SILENT = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("status >/dev/full", 74, "No space left"),
        ("status --json >/dev/full", 74, "No space left"),
        ("foo --json >/dev/full", 74, "No space left"),
        ("foo 2>/dev/full", 74, ""),
        ("status >&-", 74, _CLOSED),
        ("foo --json >&-", 74, _CLOSED),
        (f"status {_SILENT}", 74, ""),
        *(
            pytest.param(f"{each} {closed}", 74, error, marks=pytest.mark.slow)
            for each in ("status --json", "--help")
            for closed, error in ((">&-", _CLOSED), (_SILENT, ""))
        ),
        (f"foo --json {_SILENT}", 74, ""),
        ("foo >&-", 64, "No such command"),
        ("foo 2>&-", 64, ""),
        ("close JOB <&-", 1, "no terminal to ask on"),
        ("status JOB | head -1", 0, ""),
    ],
)
def test_streams_that_are_full_or_closed(
    etcd_server: EtcdServer, job_id: str, words: str, code: int, error: str
) -> None:
    """Closed as under cron, or by a supervisor. A lost result has an exit code of its own."""
    if "JOB" in words:
        plant_round(etcd_server, job_id, [f"node{number}~1~a" for number in range(50)])
    command = f"{sys.executable} -m rdzv_etcd {words.replace('JOB', job_id)}"
    done = run(["bash", "-c", command], env={"PET_RDZV_ENDPOINT": etcd_server.endpoint})
    assert (done.returncode, error in done.stderr) == (code, True), done
    assert done.stderr.count("\n") <= (1 if code == 74 else 5)
    if not error:
        assert done.stderr == ""
    assert done.stdout.startswith(job_id if code == 0 else "")


@pytest.mark.parametrize("job", ["größe", "大きさ"])
def test_what_the_output_s_encoding_does_not_have_is_escaped(
    etcd_server: EtcdServer, job: str
) -> None:
    environ = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = run_alone("status", job, "--endpoint", etcd_server.endpoint, environ=environ)
    assert (done.code, done.err) == (2, "")
    assert done.out.startswith(job.encode("ascii", "backslashreplace").decode())


def test_an_etcd_that_is_not_there_is_reported_before_the_command_gives_up() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    done = run_alone("status", "a", "--conf", "connect_timeout=5", "--endpoint", endpoint)
    first, last = done.err.splitlines()
    assert first == (
        f"no contact with etcd for 2 s, of 5: {endpoint}: connection refused - is etcd running "
        "there?"
    )
    assert last.startswith("rdzv-etcd: etcd cannot be asked: ")
    assert done.code == 3


@pytest.mark.parametrize("named", ["by an argument", "by the environment"])
def test_a_job_can_be_named_in_any_locale(etcd_server: EtcdServer, job_id: str, named: str) -> None:
    """Python decodes arguments as ASCII there."""
    job = f"größe-大きさ-{job_id}"
    plant_node(etcd_server, job, "one~1~a")
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ["PET_RDZV_ENDPOINT"] = etcd_server.endpoint
    words = ["status", "--json"]
    if named == "by an argument":
        words.append(job)
    else:
        environ["PET_RDZV_ID"] = job
    done = run_alone(*words, environ=environ)
    assert (done.code, done.err) == (1, "")
    assert json.loads(done.out)["status"]["job"] == job


def test_the_version_and_the_help(cli: Run) -> None:
    assert rdzv_etcd.__version__ in cli("--version").out
    shown = cli("--help").out
    for name in ("status", "watch", "doctor", "demo"):
        assert name in shown


def test_a_pipe_that_the_password_does_not_come_from_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "password"
    os.mkfifo(pipe)
    words = [sys.executable, "-m", "rdzv_etcd", "status", f"--conf=password_file={pipe}"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.match(rf"waiting 1\d s \(of 60\) for password_file='{pipe}': it is a pipe", line)
        pipe.write_text("s3cret\n")
        assert "without a user" in process.stderr.read()
    assert process.returncode == 64


# --- serve ----------------------------------------------------------------------------------------


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv("RDZV_ETCD_BINARY", str(find_binaries()[0].path))
    words = [sys.executable, "-m", "rdzv_etcd", "serve", "--json", "--endpoint", endpoint]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert endpoint in process.stdout.readline()
        yield process
        assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    "by", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_an_etcd_is_served_until_a_signal_ends_it(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, cli: Run
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with serving(monkeypatch, endpoint) as process:
        assert cli("status", "--endpoint", endpoint).code == 0
        second = run_alone("serve", "--endpoint", endpoint)
        assert (second.code, "already" in second.err) == (1, True)
        process.send_signal(by)
    assert cli("status", "--endpoint", endpoint, "--conf=connect_timeout=1").code == 3


def test_an_etcd_with_a_secret_lets_nobody_else_in(
    monkeypatch: pytest.MonkeyPatch, cli: Run
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", "staple-battery-horse")
    with serving(monkeypatch, endpoint) as process:
        assert cli("status", "--endpoint", endpoint).code == 0
        assert cli("doctor", "--endpoint", endpoint).code == 0
        monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", "one-that-is-not-theirs")
        assert cli("status", "--endpoint", endpoint).code == 3
        assert "it has another secret: give every" in cli("doctor", "--endpoint", endpoint).out
        monkeypatch.delenv("RDZV_ETCD_EMBED_SECRET")
        assert cli("status", "--endpoint", endpoint).code == 3
        process.terminate()


@pytest.mark.parametrize("zone", ["%lo", "%25lo"])
def test_an_address_may_have_a_zone(etcd_server: EtcdServer, cli: Run, zone: str) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    done = cli("status", "--endpoint", f"[::ffff:127.0.0.1{zone}]:{etcd_server.port}")
    assert (done.code, done.err) == (0, "")
