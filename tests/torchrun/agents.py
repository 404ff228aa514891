"""A torchrun agent as a process: its command line, its step log, and the harm done to it.

Knows nothing of what the library keeps in etcd.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support.suite import COLD_STARTS_VARIABLE
from tests.torchrun.fork_server import HERE, Forked, ForkServers

T = TypeVar("T")

WORKER = Path(__file__).with_name("worker.py")
WRONG_CLOCK = Path(__file__).with_name("wrong_clock.py")
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"

PATIENCE_S = 150.0
"""The limit of every wait. It only ends a failing test: start-up alone takes a busy two-core
machine half a minute."""

QUICK = "lease_ttl=3,last_call_timeout=5,closed_ttl=3,ended_ttl=3"
"""Settings under which a loss is noticed, and a job forgotten, within seconds."""

_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "RDZV_ETCD_TEST_MARK"
"""In the environment of every process that one test's agents have started."""


def wait_until(
    what: str,
    condition: Callable[[], T],
    *,
    timeout_s: float = PATIENCE_S,
    check: Callable[[], None] = lambda: None,
) -> T:
    """Return the condition's first true value, looking ten times a second.

    For changes that other processes make to files and to themselves, which send no event.
    ``check`` is called each time and raises when waiting has become pointless. Raises
    ``AssertionError`` after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        check()
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)
    return value


@dataclass(frozen=True)
class Step:
    """One step that one worker reported."""

    agent: str
    time: float
    pid: int
    rank: int
    world_size: int
    restart_count: int
    epoch: int
    step: int
    resumed_from: int
    resumed_fence: int = 0
    """The epoch of the checkpoint's writer. Only examples/elastic reports this and the rest."""
    training_epoch: int = 0
    samples: Sequence[int] = ()


@dataclass
class Job:
    """The command line that all agents of a job share."""

    endpoint: str
    directory: Path
    """Holds step logs, output, checkpoints and the stop file."""
    nnodes: str
    nproc: int = 1
    run_id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    conf: str = QUICK
    max_restarts: int = 5
    backend: str = "etcd3"
    script: Path = WORKER
    script_args: Sequence[str] = ()
    allreduce: bool = False
    """Whether the workers use torch: then they must find each other, and fail if one dies."""
    launcher: Sequence[str] = ("-m", "torch.distributed.run")
    """Python's arguments."""
    enter: Callable[[list[str]], list[str]] = list
    """Returns the command line that runs the given one on another host."""
    fork_servers: ForkServers | None = None
    """The servers that fork the agents on other hosts."""

    @property
    def stop_file(self) -> Path:
        return self.directory / "stop"

    def command(self, name: str) -> list[str]:
        log = self.directory / f"{name}.steps"
        command = [sys.executable, *self.launcher]
        command += [f"--nnodes={self.nnodes}", f"--nproc-per-node={self.nproc}"]
        command += [f"--rdzv-backend={self.backend}", f"--rdzv-id={self.run_id}"]
        command += [f"--rdzv-endpoint={self.endpoint}", f"--max-restarts={self.max_restarts}"]
        if self.conf:
            command.append(f"--rdzv-conf={self.conf}")
        command += [f"--log-dir={self.directory / 'torchrun'}", str(self.script)]
        command.append(f"--step-log={log}")
        if self.script == DIGITS:
            command.append(f"--checkpoint-dir={self.directory / name}")
        else:
            command.append(f"--stop-file={self.stop_file}")
            command += ["--allreduce"] if self.allreduce else []
        return self.enter([*command, *self.script_args])


class Agent:
    """One torchrun process, which stands for a node."""

    def __init__(self, name: str, job: Job, environment: Mapping[str, str]) -> None:
        self.name = name
        self.may_end = False
        """Whether the test expects this agent to end, or has ended it."""
        self._frozen: list[psutil.Process] = []
        self._steps: list[Step] = []
        self._read = 0
        """How many bytes of the step log are in ``_steps``."""
        self._step_log = job.directory / f"{name}.steps"
        self._output = job.directory / f"{name}.output"
        self.process = _start(job, job.command(name), self._output, environment)

    def __repr__(self) -> str:
        return f"agent {self.name} (pid {self.process.pid}, exit code {self.process.poll()})"

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def steps(self) -> list[Step]:
        """Return the steps that this agent's workers have reported, in their order."""
        if self._step_log.exists():
            with self._step_log.open("rb") as log:
                log.seek(self._read)
                complete, newline, _ = log.read().rpartition(b"\n")
            self._read += len(complete + newline)
            lines = complete.splitlines()
            self._steps += [Step(agent=self.name, **json.loads(line)) for line in lines]
        return list(self._steps)

    def steps_after(self, moment: float) -> list[Step]:
        """Return the steps reported after a moment (wall clock)."""
        return [step for step in self.steps() if step.time > moment]

    def kill(self) -> None:
        """End the agent and its workers like a power cut: none of them can announce it."""
        self.may_end = True
        agent = psutil.Process(self.process.pid)
        agent.suspend()  # so that it starts no worker between the listing and the kill
        workers = agent.children(recursive=True)
        for process in (agent, *workers):
            process.kill()
        self.process.wait()
        psutil.wait_procs(workers, timeout=PATIENCE_S)

    def freeze(self, *, workers: bool = True) -> None:
        """Stop the agent, by default with its workers, like a machine that hangs."""
        agent = psutil.Process(self.process.pid)
        agent.suspend()
        self._frozen = [agent, *(agent.children(recursive=True) if workers else ())]
        for process in self._frozen:
            process.suspend()

    def thaw(self) -> None:
        while self._frozen:
            self._frozen.pop().resume()

    def terminate(self) -> None:
        """Ask torchrun to stop, as a job scheduler does."""
        self.may_end = True
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Return the agent's exit code."""
        self.may_end = True
        return self.process.wait(timeout_s)


def _start(
    job: Job, command: list[str], output: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | Forked:
    """Start an agent: forked from a process that has torch, unless starts must be cold or the
    command is not plain torchrun."""
    with output.open("wb") as written:
        where = [at for at in range(len(command)) if command[at : at + len(_TORCHRUN)] == _TORCHRUN]
        servers = job.fork_servers or (HERE if where == [0] else None)
        if not where or servers is None or COLD_STARTS_VARIABLE in os.environ:
            return subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=job.directory,
                start_new_session=True,
            )
    enter, arguments = command[: where[0]], command[where[0] + len(_TORCHRUN) :]
    return servers.start(enter, arguments, output, environ=environment, cwd=job.directory)
