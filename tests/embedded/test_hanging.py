"""An etcd that hangs, or is a script: the wait is told, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.binary import examine
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError
from tests.cli.terminal import Terminal
from tests.embedded.agents import environment, has_ended, settings
from tests.embedded.test_binary import script
from tests.library.nodes import wait_until
from tests.support.servers import find_binaries

_HELPER = "sleep 1000 >/dev/null 2>&1 & echo $! >>{pids}"
_VERSION = "case $1 in --version) echo 'etcd Version: 3.5.9'; exit;; esac"


class Helpers:
    """The children of a script that stands for etcd."""

    def __init__(self, folder: Path) -> None:
        self._pids = folder / "pids"
        self.start = _HELPER.format(pids=self._pids)

    def wait_for_start(self) -> None:
        wait_until("a child is there", self._pids.exists)

    def wait_for_end(self) -> None:
        pids = [int(line) for line in self._pids.read_text().split()]
        assert pids
        wait_until("no child is left", lambda: all(map(_has_ended, pids)))


def _has_ended(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def helpers(tmp_path: Path) -> Helpers:
    return Helpers(tmp_path)


def test_one_that_does_not_tell_its_version_is_given_up(tmp_path: Path, helpers: Helpers) -> None:
    path = script(tmp_path / "hangs", f"{helpers.start}; wait")
    assert examine(path, 2.0) == f"{path} --version has not ended within 2 s, as etcd's does"
    helpers.wait_for_end()


def test_a_child_that_a_version_check_leaves_is_ended(tmp_path: Path, helpers: Helpers) -> None:
    path = script(tmp_path / "leaves", f"{helpers.start}; echo no version")
    assert "does not answer as etcd's does" in str(examine(path))
    helpers.wait_for_end()


def test_a_crash_is_quoted_and_leaves_no_child(
    tmp_path: Path, helpers: Helpers, scratch: Path, port: int
) -> None:
    path = script(
        tmp_path / "crashes", f"{_VERSION}; {helpers.start}; echo 'fatal: on fire'; exit 1"
    )
    with pytest.raises(EmbeddedEtcdError, match=r"did not start.*fatal: on fire"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), environment(path, scratch))
    helpers.wait_for_end()
    assert list(scratch.iterdir()) == []


def test_a_node_says_that_its_etcd_does_not_answer(
    tmp_path: Path,
    helpers: Helpers,
    scratch: Path,
    port: int,
    supervisors: Callable[[], list[psutil.Process]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = script(tmp_path / "hangs", f"{_VERSION}; {helpers.start}; wait")
    with pytest.raises(
        EmbeddedEtcdError,
        match=r"within 15 s: .*hangs/etcd, which this node has started, .* name another",
    ):
        ensure_etcd(settings(f"127.0.0.1:{port}", join_timeout=15), environment(path, scratch))
    assert "waiting 10 s (of " in caplog.text
    assert f"{path}, which this node has started, does not serve yet; if" in caplog.text
    (supervisor,) = supervisors()
    supervisor.terminate()
    wait_until("the supervisor has ended", lambda: has_ended(supervisor))
    helpers.wait_for_end()
    assert list(scratch.iterdir()) == []


def test_serve_in_the_background_of_a_shell_outlives_ctrl_c(scratch: Path, port: int) -> None:
    """The shell lets it ignore that; it comes all the same to whoever asks for signals."""
    endpoint = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "rdzv_etcd", "serve", "--endpoint", endpoint, "--json"]
    ignored = ["env", "--ignore-signal=INT", *command]
    binary = find_binaries()[0].path
    env = {**os.environ, **environment(binary, scratch)}
    with subprocess.Popen(ignored, stdout=subprocess.PIPE, env=env) as serve:
        assert serve.stdout is not None
        assert b"serving" in serve.stdout.readline()
        serve.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            serve.wait(2)
        serve.terminate()
        assert serve.wait(30) == 0
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        ("--version", signal.SIGTERM),
        ("to serve", signal.SIGINT),
        pytest.param("--version", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("to serve", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("to serve", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_serve_says_what_it_waits_for_and_ends_when_told(
    tmp_path: Path,
    helpers: Helpers,
    scratch: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    how: signal.Signals,
) -> None:
    known = _VERSION if asked == "to serve" else ":"
    path = script(tmp_path / "hangs", f"{known}; {helpers.start}; wait")
    for name, value in environment(path, scratch).items():
        monkeypatch.setenv(name, value)
    with Terminal("serve", "--endpoint", f"127.0.0.1:{port}") as terminal:
        if asked == "to serve":
            terminal.wait_for("starting .*hangs/etcd: waiting up to 120 s")
        helpers.wait_for_start()
        if how is signal.SIGINT:
            terminal.press(b"\x03")
        else:
            psutil.Process(terminal.pid).send_signal(how)
        assert terminal.end() == (0 if asked == "to serve" else 130)
    helpers.wait_for_end()
    assert list(scratch.iterdir()) == []
