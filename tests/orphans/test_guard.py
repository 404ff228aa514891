"""What a killed agent has started is ended, and nothing else. Real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rdzv_etcd import orphans as guard
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.parse import NODE_ID_VARIABLE
from rdzv_etcd.world.group import Group
from tests.library.nodes import LIMIT_S, node_settings
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer

_AGENT = f"""
import json, os, signal, subprocess, sys, time
import rdzv_etcd

endpoint, job, work = sys.argv[1:4]
group = rdzv_etcd.connect(endpoint, job=job, nodes=1, orphans="kill", ended_ttl=5)
group.join()
marked = dict(os.environ, {NODE_ID_VARIABLE}=group.node_id)

def start(program, env=None):
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )
    child.stdout.readline()
    return child.pid

idle = "import time; print(flush=True); time.sleep(1000)"
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + idle
parent = (
    "import subprocess, sys; print(flush=True); "
    "subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
)
pids = {{"worker": start(idle, marked), "parent": start(parent, marked), "other": start(idle)}}
if work == "deaf":
    pids["deaf"] = start(deaf, marked)
if work == "fork":
    pids["other_fork"] = os.fork()
    if not pids["other_fork"]:
        time.sleep(1000)
print(json.dumps(pids), flush=True)
if work == "leave":
    sys.stdin.readline()  # its guard has been found
    group.leave()
    print("left", flush=True)
if work == "exit":
    sys.exit()
signal.pause()
"""


class Agent:
    """A program that takes part in a job of its own, with workers."""

    def __init__(self, server: EtcdServer, job_id: str, work: str, folder: Path) -> None:
        self._errors = folder / "stderr"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _AGENT, server.target, job_id, work],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.pids: dict[str, int] = json.loads(self.process.stdout.readline())
        self.children = {name: psutil.Process(pid) for name, pid in self.pids.items()}
        self.children["grandchild"] = _child_of(self.children["parent"])
        (self.guard,) = [
            each
            for each in psutil.process_iter()
            if guard.__file__ in _command(each) and str(self.process.pid) in _command(each)
        ]
        assert self.process.stdin is not None
        self.process.stdin.close()

    @property
    def said(self) -> str:
        return self._errors.read_text()

    def marked(self) -> list[psutil.Process]:
        return [child for name, child in self.children.items() if not name.startswith("other")]

    def others(self) -> list[psutil.Process]:
        return [child for name, child in self.children.items() if name.startswith("other")]

    def close(self) -> None:
        for each in (*self.children.values(), self.guard):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _child_of(process: psutil.Process) -> psutil.Process:
    deadline_s = time.monotonic() + LIMIT_S
    while not (children := process.children()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return children[0]


@pytest.fixture
def agent(
    request: pytest.FixtureRequest,
    etcd_server: EtcdServer,
    job_id: str,
    tmp_path: Path,
) -> Iterator[Agent]:
    made = Agent(etcd_server, job_id, request.param, tmp_path)
    yield made
    made.close()


def doing(work: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("agent", [work], indirect=True)


@pytest.mark.parametrize("agent", ["", "fork"], indirect=True)
def test_what_a_killed_agent_has_started_is_ended_and_nothing_else(agent: Agent) -> None:
    """Also while a forked child of the agent's, which is no worker, holds what it had open."""
    agent.process.kill()
    agent.process.wait()
    _, alive = psutil.wait_procs([*agent.marked(), agent.guard], timeout=LIMIT_S)
    assert not alive
    assert all(other.is_running() for other in agent.others())
    assert len(agent.said.splitlines()) == 1
    assert "died without leaving the job; terminated 3 processes" in agent.said
    assert "SIGKILL" not in agent.said


@doing("deaf")
def test_who_does_not_listen_to_sigterm_is_killed(agent: Agent) -> None:
    began_s = time.monotonic()
    agent.process.kill()
    agent.process.wait()
    _, alive = psutil.wait_procs([*agent.marked(), agent.guard], timeout=LIMIT_S)
    assert not alive
    assert time.monotonic() - began_s >= guard.TERM_GRACE_S
    assert "terminated 4 processes it had started, 1 of them with SIGKILL" in agent.said


@doing("exit")
def test_what_is_left_by_one_that_ends_and_does_not_leave_is_ended(agent: Agent) -> None:
    """As torchrun does at a signal, and a worker that it has just started it has forgotten."""
    assert agent.process.wait() == 0
    _, alive = psutil.wait_procs([*agent.marked(), agent.guard], timeout=LIMIT_S)
    assert not alive
    assert all(other.is_running() for other in agent.others())
    assert "terminated 3 processes it had started" in agent.said


@doing("leave")
def test_who_leaves_in_order_ends_nobody(agent: Agent) -> None:
    assert agent.process.stdout is not None
    assert agent.process.stdout.readline() == "left\n"
    psutil.wait_procs([agent.guard], timeout=LIMIT_S)
    agent.process.kill()
    agent.process.wait()
    assert not agent.guard.is_running()
    assert all(child.is_running() for child in agent.children.values())
    assert agent.said == ""


@doing("")
def test_a_stopped_agent_and_signals_to_the_guard_end_nobody(agent: Agent) -> None:
    agent.process.send_signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        agent.guard.send_signal(number)
    agent.process.send_signal(signal.SIGCONT)
    assert agent.guard.is_running()
    assert all(child.is_running() for child in agent.children.values())
    agent.process.terminate()  # Python's own way to end at SIGTERM: without a good-bye
    agent.process.wait()
    _, alive = psutil.wait_procs(agent.marked(), timeout=LIMIT_S)
    assert not alive


def test_an_unknown_word_is_refused(etcd_server: EtcdServer, job_id: str) -> None:
    with pytest.raises(SettingsError, match=r"orphans='adopt' must be one of leave, kill"):
        node_settings(etcd_server, job_id, "1", orphans="adopt")


def test_where_it_cannot_start_it_says_so(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(SettingsError, match=r"orphans=kill: the guard did not start: .*no/python"):
        Group(node_settings(etcd_server, job_id, "1", orphans="kill"))
