"""The program itself: without its extra, with wrong words, in pipes, from the environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd.cli.options import JobTarget
from rdzv_etcd.embedded.port import own_addresses
from tests.cli.tools import LIMIT_S, Run, plant_node, plant_round, run_alone
from tests.support.processes import free_port
from tests.support.servers import EtcdServer, find_binaries

_PROGRAM = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from rdzv_etcd.cli import main; "
_PROGRAM += "sys.exit(main())"


def run_without(missing: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program where that package is not installed."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((missing, "rdzv", "__editable__")):
            (folder / entry.name).symlink_to(entry)
    (folder / "rdzv_etcd").symlink_to(Path(rdzv_etcd.__file__).parent)
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(folder), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_extra_it_says_what_to_install(missing: str, tmp_path: Path) -> None:
    done = run_without(missing, tmp_path, "status")
    assert done.returncode == 2
    expected = f"rdzv-etcd needs the package {missing}: pip install 'rdzv-etcd[cli]'\n"
    assert (done.stdout, done.stderr) == ("", expected)


def test_a_picture_without_matplotlib_is_refused_at_once(tmp_path: Path) -> None:
    done = run_without("matplotlib", tmp_path, "history", "my-job", "--plot", "job.svg")
    assert done.returncode == 64
    expected = "rdzv-etcd: --plot needs matplotlib: pip install 'rdzv-etcd[plot]'\n"
    assert (done.stdout, done.stderr) == ("", expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nonsense",), "No such command"),
        (("status", "--nonsense"), "No such option"),
        (("status", "j", "--conf=lease_ttl=soon"), "lease_ttl"),
        (("status", "j", "--conf=password=x"), "RDZV_ETCD_PASSWORD"),
        (("status", "j", "--conf=nothing"), "NAME=VALUE"),
        (("status", "j", "--endpoint=me:secret@host"), "RDZV_ETCD_USER"),
        (("doctor", "--nnodes=many"), "--nnodes"),
        (("history",), "name a job"),
        (("history", "j", "--plot=job.gif"), ".svg, .png, .pdf"),
        (("evict", "j"), "NODE"),
        (("evict", "j", "n", "--wait=nan"), "not a number of seconds"),
        (("evict", "j", "n", "--wait=inf"), "is not in the range"),
        (("drain", "j", "n", "--wait=nan"), "not a number of seconds"),
        (("drain", "j", "n", "--wait=1e9"), "is not in the range"),
        (("doctor", "--listen=NaN"), "not a number of seconds"),
        (("doctor", "--listen=-1"), "is not in the range"),
        (("serve", "--endpoint=https://127.0.0.1:1"), "http only"),
        (("serve", "--endpoint=192.0.2.1:1"), "not an address of this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words_end_it_with_64(words: tuple[str, ...], said: str, cli: Run) -> None:
    done = cli(*words)
    assert done.code == 64
    assert said in done.err
    assert "secret" not in done.err
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
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rdzv_etcd", *words, "--endpoint", etcd_server.endpoint],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [("status",), ("status", "--json")])
def test_a_full_disk_is_not_taken_for_a_result(
    etcd_server: EtcdServer, words: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rdzv_etcd", *words, "--endpoint", etcd_server.endpoint],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    assert done.returncode == 74
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", ["foo --json >/dev/full", "foo 2>/dev/full"])
def test_an_error_that_cannot_be_written_is_none_of_another_kind(words: str) -> None:
    done = run_in_a_shell(words)
    assert (done.returncode, done.stdout) == (74, "")
    assert len(done.stderr.splitlines()) <= 1, done.stderr


@pytest.mark.parametrize("words", ["status", "status --json", "--help", "foo --json"])
def test_a_result_for_a_closed_output_is_not_taken_for_written(
    etcd_server: EtcdServer, words: str
) -> None:
    """As under cron, or a supervisor that closes what it does not want."""
    environ = {"PET_RDZV_ENDPOINT": etcd_server.endpoint}
    expected = "rdzv-etcd: cannot be written: standard output is closed\n"
    done = run_in_a_shell(f"{words} >&-", environ)
    assert (done.returncode, done.stderr) == (74, expected)
    done = run_in_a_shell(f"{words} <&- >&- 2>&-", environ)
    assert (done.returncode, done.stderr) == (74, "")


def test_what_says_nothing_there_is_as_with_an_open_output(
    etcd_server: EtcdServer, job_id: str
) -> None:
    environ = {"PET_RDZV_ENDPOINT": etcd_server.endpoint}
    done = run_in_a_shell("foo >&-", environ)
    assert (done.returncode, "No such command" in done.stderr) == (64, True)
    done = run_in_a_shell("foo 2>&-", environ)
    assert (done.returncode, done.stderr) == (64, "")
    plant_round(etcd_server, job_id, ["one~1~a"])
    done = run_in_a_shell(f"close {job_id} <&-", environ)
    assert done.returncode == 1
    assert "no terminal to ask on" in done.stderr


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


def run_in_a_shell(
    words: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it with redirections."""
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rdzv_etcd {words}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, **(environ or {})},
    )


def test_a_reader_that_goes_away_is_no_error(etcd_server: EtcdServer, job_id: str) -> None:
    for number in range(50):
        plant_node(etcd_server, job_id, f"node{number}~1~a")
    program = f"{sys.executable} -m rdzv_etcd"
    done = subprocess.run(
        ["bash", "-c", f"{program} status {job_id} --endpoint {etcd_server.endpoint} | head -1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith(job_id)
    assert done.stderr == ""


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
        assert f"the pipe password_file='{pipe}'" in process.stderr.readline()
        pipe.write_text("s3cret\n")
        assert "without a user" in process.stderr.read()
    assert process.returncode == 64


# --- serve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_etcd_is_served_until_it_is_told_to_end(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, cli: Run
) -> None:
    monkeypatch.setenv("RDZV_ETCD_BINARY", str(find_binaries()[0].path))
    endpoint = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "rdzv_etcd", "serve", "--json", "--endpoint", endpoint]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert endpoint in process.stdout.readline()
        assert cli("status", "--endpoint", endpoint).code == 0
        second = run_alone("serve", "--endpoint", endpoint)
        assert (second.code, "already" in second.err) == (1, True)
        process.send_signal(by)
        assert process.wait(LIMIT_S) == 0
    assert cli("status", "--endpoint", endpoint, "--conf=connect_timeout=1").code == 3


@pytest.mark.parametrize("zone", ["%lo", "%25lo"])
def test_an_address_may_have_a_zone(etcd_server: EtcdServer, cli: Run, zone: str) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    done = cli("status", "--endpoint", f"[::ffff:127.0.0.1{zone}]:{etcd_server.port}")
    assert (done.code, done.err) == (0, "")


def test_an_etcd_with_a_password_lets_nobody_else_in(
    monkeypatch: pytest.MonkeyPatch, cli: Run
) -> None:
    monkeypatch.setenv("RDZV_ETCD_BINARY", str(find_binaries()[0].path))
    endpoint = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "rdzv_etcd", "serve", "--endpoint", endpoint]
    monkeypatch.setenv("RDZV_ETCD_USER", "me")
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "mine")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serves" in process.stdout.readline()
        assert cli("status", "--endpoint", endpoint).code == 0
        monkeypatch.delenv("RDZV_ETCD_USER")
        monkeypatch.delenv("RDZV_ETCD_PASSWORD")
        assert cli("status", "--endpoint", endpoint).code == 3
        process.terminate()
        assert process.wait(LIMIT_S) == 0
