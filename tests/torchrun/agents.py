"""Real torchrun agents as processes: start, kill, stop, wait for what their workers report.

Knows torchrun's command line and the step logs of the scripts it starts; knows nothing of what the
library keeps in etcd.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
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
_MARK = "RDZV_ETCD_TEST_MARK"


def wait_until(
    what: str,
    condition: Callable[[], T],
    *,
    timeout_s: float = PATIENCE_S,
    check: Callable[[], None] = lambda: None,
) -> T:
    """Return the condition's first true value, looking ten times a second.

    For what other processes do to files and to themselves, which sends no event. ``check`` is
    called each time and raises when waiting has become pointless. Raises ``AssertionError`` after
    ``timeout_s``.
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
    """The epoch of the checkpoint's writer. This and what follows is examples/elastic's."""
    training_epoch: int = 0
    samples: Sequence[int] = ()


@dataclass
class Job:
    """What all agents of a job have on their command line."""

    endpoint: str
    directory: Path
    """Step logs, output, checkpoints and the stop file."""
    nnodes: str
    nproc: int = 1
    run_id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    conf: str = QUICK
    max_restarts: int = 5
    backend: str = "etcd3"
    script: Path = WORKER
    script_args: Sequence[str] = ()
    allreduce: bool = False
    """Whether the workers use torch: they then have to find each other, and fail if one dies."""
    launcher: Sequence[str] = ("-m", "torch.distributed.run")
    """What Python runs."""
    enter: Callable[[list[str]], list[str]] = list
    """Returns the command line that runs the given one on another host."""
    fork_servers: ForkServers | None = None
    """Where agents on other hosts are forked, if they are."""

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
    """One torchrun process; it stands for a node."""

    def __init__(self, name: str, job: Job, environment: dict[str, str]) -> None:
        self.name = name
        self.may_end = False
        """Whether the test expects this agent to end (or has ended it)."""
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
        """Return what this agent's workers have reported so far, in the order of the reports."""
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
        """End the agent and its workers like a power cut: nobody gets to say goodbye."""
        self.may_end = True
        agent = psutil.Process(self.process.pid)
        agent.suspend()  # so that it starts no worker between the listing and the kill
        workers = agent.children(recursive=True)
        for process in (agent, *workers):
            process.kill()
        self.process.wait()
        psutil.wait_procs(workers, timeout=PATIENCE_S)

    def freeze(self, *, workers: bool = True) -> None:
        """Stop the agent like a machine that hangs, until :meth:`thaw`; ``workers``: them too."""
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
    job: Job, command: list[str], output: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes] | Forked:
    """Start an agent: forked from a process that has torch, unless starts are to be cold, or what
    is run is not just torchrun."""
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


def _time(step: Step) -> float:
    return step.time


class Agents:
    """All agents of one test. ``close`` leaves none of their processes behind."""

    def __init__(self) -> None:
        self._agents: list[Agent] = []
        self._mark = uuid.uuid4().hex

    def start(self, job: Job, *names: str, **environment: str) -> list[Agent]:
        """Start one agent per name; ``environment`` is added to this process's."""
        values = {**os.environ, _MARK: self._mark, "OMP_NUM_THREADS": "1", **environment}
        values.setdefault("LOGLEVEL", "INFO")
        started = [Agent(name, job, values) for name in names]
        self._agents += started
        return started

    def wait_until(self, what: str, condition: Callable[[], T]) -> T:
        """Return the condition's first true value; fail at once if an agent ends unexpectedly."""
        return wait_until(what, condition, check=self._fail_if_one_ended)

    def wait_for_world(
        self, agents: Sequence[Agent], *, size: int, steps: int = 3, after: float = 0.0
    ) -> list[Step]:
        """Wait until ``agents``, and only they, train in one world; return one step of each rank.

        A world counts when every rank from 0 to ``size - 1`` has reported ``steps`` steps in it,
        the first of them later than ``after`` (wall clock of this machine).
        """
        names = sorted(agent.name for agent in agents)
        return self.wait_until(
            f"a world of {size} workers on {', '.join(names)}",
            lambda: self._world(agents, size, steps, after),
        )

    def wait_for_undisturbed_steps(self, agents: Sequence[Agent], count: int) -> None:
        """Wait for ``count`` more steps of each agent; fail if a worker was restarted meanwhile."""
        before = {step.pid for agent in agents for step in agent.steps()}
        now = time.time()
        self.wait_until(
            f"{count} more steps of each agent",
            lambda: all(len(agent.steps_after(now)) > count for agent in agents),
        )
        after = {step.pid for agent in agents for step in agent.steps()}
        assert after == before, "workers were restarted"

    def close(self) -> None:
        """End every process that the agents have started, and print what they wrote."""
        for agent in self._agents:  # a forked one does not carry the mark
            agent.process.kill()
        for process in self._all_processes():
            process.kill()
        for agent in self._agents:
            agent.process.wait()
            print(f"\n===== {agent} =====\n{agent.output}")
            print("\n".join(map(str, agent.steps()[-6:])))

    def _world(self, agents: Sequence[Agent], size: int, steps: int, after: float) -> list[Step]:
        """Return the newest world's first step of each rank; nothing while it is incomplete."""
        attempts: dict[tuple[str, int], list[Step]] = {}
        for step in sorted((step for agent in agents for step in agent.steps()), key=_time):
            attempts.setdefault((step.agent, step.pid), []).append(step)
        newest_of_rank = {attempt[0].rank: attempt for attempt in attempts.values()}
        world = [newest_of_rank[rank] for rank in range(size) if rank in newest_of_rank]
        complete = (
            len(world) == size
            and all(len(attempt) >= steps and attempt[0].time > after for attempt in world)
            and {(attempt[0].world_size, attempt[0].epoch) for attempt in world}
            == {(size, world[0][0].epoch)}
            and {attempt[0].agent for attempt in world} == {agent.name for agent in agents}
        )
        return [attempt[0] for attempt in world] if complete else []

    def _fail_if_one_ended(self) -> None:
        for agent in self._agents:
            if not agent.may_end and agent.process.poll() is not None:
                raise AssertionError(f"{agent} ended although nothing asked it to")

    def _all_processes(self) -> Iterator[psutil.Process]:
        """Yield every living process that carries this test's mark in its environment.

        Workers are in sessions of their own and outlive a killed agent, so neither process groups
        nor parents find them all.
        """
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended meanwhile, or not ours
