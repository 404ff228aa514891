"""Real jobs, traced, as a rule torchrun's: starts agents, hurts them, reads what they noted.

Knows torchrun's command line and the two kinds of trace; knows no backend's inside.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "workers" / "steps.py"
_NAME = "RDZV_ETCD_BENCHMARK_AGENT"
_MARK = "RDZV_ETCD_BENCHMARK_MARK"


OWN_STORE = "-own-store"
"""Ending of a backend's name here: workers get a store of their own instead of the agents'.

torch's c10d and etcd-v2 hand workers the address of the first round's store in every round (seen in
2.13: ``DynamicRendezvousHandler._bootstrap_store_info``), with the keys of the process group before
in it. New workers may then wait for ever. This is torch's switch against it.
"""
IN_PROCESS = "etcd3 in process"
"""Not torchrun's: each node is one process of :mod:`benchmarks.workers.in_process`, which goes on
itself."""
SUPERVISED = "etcd3 in process under torchrun"
"""torchrun's agents, each of which starts two such processes and looks after them."""
EMBEDDED = "etcd3 embedded"
"""torchrun's etcd3, on a cluster of etcd that the job's own hosts run."""
_OWN_STORE_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


LIVES = 100_000
"""A process that goes on itself has a life in every world: its process id times this, and the
number of the round."""


class JobError(Exception):
    """The job did not get where it should; the message says how far it came."""


@dataclass(frozen=True)
class Note:
    """One line of a trace, of an agent (``pid`` 0) or of one of its workers."""

    agent: str
    event: str
    time_s: float
    rank: int | None
    pid: int = 0
    size: int = 0
    restarts: int = 0
    """How many of ``--max-restarts`` its agent had used up when the worker was started."""


@dataclass(frozen=True)
class Place:
    """Where an agent runs."""

    address: str = "127.0.0.1"
    enter: Callable[[list[str]], list[str]] = list
    """Returns the command line that runs the given one there."""


HERE = Place()


@dataclass
class JobOptions:
    """What all agents of a job have on their command line."""

    backend: str
    endpoint: str
    nnodes: str
    workers: int = 1
    conf: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    collectives: str = "gloo"
    launcher: str = "benchmarks.traced_torchrun"
    """The module that stands for torchrun."""
    run_id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")

    @property
    def torch_backend(self) -> str:
        """The backend's name for torchrun."""
        ours = self.backend in (EMBEDDED, SUPERVISED)
        return "etcd3" if ours else self.backend.removesuffix(OWN_STORE)

    @property
    def is_c10d(self) -> bool:
        return self.torch_backend == "c10d"

    @property
    def environment(self) -> dict[str, str]:
        return _OWN_STORE_ENV if self.backend.endswith(OWN_STORE) else {}


class TracedAgent:
    """One torchrun process, or one that trains itself; it stands for a node."""

    def __init__(
        self, name: str, job: TracedJob, conf: dict[str, str], env: dict[str, str], place: Place
    ) -> None:
        self.name = name
        self.place = place
        self.expected_to_end = False
        self._is_supervisor = job.options.backend == SUPERVISED
        self._files = [job.folder / f"{name}.agent", job.folder / f"{name}.workers"]
        self._output = job.folder / f"{name}.output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                place.enter(self._command(job, conf)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )

    def _command(self, job: TracedJob, conf: dict[str, str]) -> list[str]:
        options = job.options
        if options.backend == IN_PROCESS:
            return self._in_process(options, conf)
        if options.backend == SUPERVISED:
            return self._supervised(job, conf)
        command = [sys.executable, "-m", options.launcher, str(self._files[0])]
        command += [f"--nnodes={options.nnodes}", f"--nproc-per-node={options.workers}"]
        command += [
            f"--rdzv-backend={options.torch_backend}",
            f"--rdzv-endpoint={options.endpoint}",
        ]
        command += [f"--rdzv-id={options.run_id}", "--max-restarts=100"]
        if conf:
            command.append("--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in conf.items()))
        command += [f"--log-dir={job.folder / 'torchrun'}", f"--local-addr={self.place.address}"]
        command += [str(SCRIPT), f"--moments={self._files[1]}", f"--stop-file={job.stop_file}"]
        return [*command, f"--device={options.device}", f"--collectives={options.collectives}"]

    def _supervised(self, job: TracedJob, conf: dict[str, str]) -> list[str]:
        options = job.options
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={options.nnodes}"]
        command += [f"--nproc-per-node={options.workers}", "--rdzv-backend=etcd3"]
        command += [f"--rdzv-endpoint={options.endpoint}", f"--rdzv-id={options.run_id}"]
        command.append("--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in conf.items()))
        command += ["--max-restarts=100", f"--log-dir={job.folder / 'torchrun'}"]
        command += [f"--local-addr={self.place.address}", "-m", "benchmarks.workers.in_process"]
        command += [f"--trace={self._files[0]}", f"--moments={self._files[1]}"]
        return [*command, f"--collectives={options.collectives}"]

    def _in_process(self, options: JobOptions, conf: dict[str, str]) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.workers.in_process"]
        command += [f"--trace={self._files[0]}", f"--moments={self._files[1]}"]
        command += [f"--endpoint={options.endpoint}", f"--job={options.run_id}"]
        command += [f"--nodes={options.nnodes}", f"--local-addr={self.place.address}"]
        command.append("--conf=" + ",".join(f"{k}={v}" for k, v in conf.items()))
        return [*command, f"--collectives={options.collectives}"]

    def notes(self) -> list[Note]:
        """Everything noted so far, in order of time."""
        notes = []
        for file in self._files:
            text = file.read_text() if file.exists() else ""
            complete, _, _ = text.rpartition("\n")
            for line in complete.splitlines():
                seen = json.loads(line)
                seen["time_s"] = seen.pop("time")
                notes.append(Note(agent=self.name, **seen))
        return sorted(notes, key=lambda note: note.time_s)

    def rank(self) -> int | None:
        """The node's rank in the newest round it has joined; of several nodes the lowest."""
        notes = self.notes()
        if self._is_supervisor:
            begun = [note for note in notes if note.event == "worker_begin"]
            newest = {note.pid // LIVES: note.rank for note in begun}
            return min((rank for rank in newest.values() if rank is not None), default=None)
        ranks = [note.rank for note in notes if note.event == "rendezvous_end"]
        return ranks[-1] if ranks else None

    def pids(self) -> set[int]:
        """Of the node, or of the several that this agent looks after."""
        if not self._is_supervisor:
            return {self.process.pid}
        return {note.pid // LIVES for note in self.notes() if note.pid}

    def kill(self) -> float:
        """End agent and workers like a power cut; returns the moment."""
        self.expected_to_end = True
        agent = psutil.Process(self.process.pid)
        agent.suspend()  # so that it starts no worker between the listing and the kill
        workers = agent.children(recursive=True)
        moment_s = time.monotonic()
        for process in (agent, *workers):
            process.kill()
        self.process.wait()
        return moment_s

    def terminate(self) -> float:
        """Send SIGTERM, as a scheduler does; returns the moment."""
        self.expected_to_end = True
        self.process.send_signal(signal.SIGTERM)
        return time.monotonic()

    def kill_worker(self) -> float:
        """Kill one worker; returns the moment."""
        steps = [note.pid for note in self.notes() if note.event == "step"]
        workers = {pid // LIVES if self._is_supervisor else pid for pid in steps}
        alive = [c for c in psutil.Process(self.process.pid).children(True) if c.pid in workers]
        moment_s = time.monotonic()
        alive[0].kill()
        return moment_s

    @property
    def output(self) -> str:
        """What torchrun has written so far."""
        return self._output.read_text(errors="replace")

    def tail(self) -> str:
        return self.output[-1500:]


class TracedJob:
    """All agents of one job; a context manager that leaves none of their processes behind."""

    def __init__(self, options: JobOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.stop_file = folder / "stop"
        self.agents: list[TracedAgent] = []
        self._mark = uuid.uuid4().hex

    def start(
        self,
        name: str,
        *,
        conf: dict[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        place: Place = HERE,
    ) -> TracedAgent:
        """Start one more agent; ``conf`` is added to the job's, ``env`` to its environment."""
        values = {**os.environ, _MARK: self._mark, _NAME: name, "OMP_NUM_THREADS": "1"}
        values.update(self.options.environment, **(env or {}))
        agent = TracedAgent(name, self, {**self.options.conf, **(conf or {})}, values, place)
        self.agents.append(agent)
        return agent

    def await_steps(
        self, agents: Sequence[TracedAgent], *, after_s: float, limit_s: float, steps: int = 1
    ) -> None:
        """Wait until every worker of ``agents``, in a world of just them, has made steps.

        Only workers that began after ``after_s`` count. Raises :class:`JobError`.
        """
        size = len(agents) * self.options.workers

        def there() -> bool:
            for agent in agents:
                notes = [note for note in agent.notes() if note.time_s > after_s]
                fresh = {note.pid for note in notes if note.event == "worker_begin"}
                made = [
                    note.pid
                    for note in notes
                    if note.event == "step" and note.size == size and note.pid in fresh
                ]
                complete = [pid for pid in set(made) if made.count(pid) >= steps]
                if len(complete) < self.options.workers:
                    return False
            return True

        self._await(there, f"steps in a world of {size}", limit_s)

    def await_note(self, agent: TracedAgent, event: str, limit_s: float) -> float:
        """Wait until the agent has noted an event; return its first moment."""

        def moments() -> list[float]:
            return [note.time_s for note in agent.notes() if note.event == event]

        self._await(lambda: bool(moments()), f"{event} of agent {agent.name}", limit_s)
        return moments()[0]

    def fail_if_one_ended(self) -> None:
        """Raise :class:`JobError` if an agent has ended that nobody has ended."""
        for agent in self.agents:
            code = agent.process.poll()
            if code is not None and not agent.expected_to_end:
                raise JobError(f"agent {agent.name} ended with code {code}\n{agent.tail()}")

    def _await(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            self.fail_if_one_ended()
            if time.monotonic() > deadline_s:
                raise JobError(f"not within {limit_s:g} s: {what}")
            time.sleep(0.05)  # files send no event; the moments measured are in them

    def close(self) -> None:
        for process in self._all_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents:
            agent.process.wait()

    def _all_processes(self) -> Iterator[psutil.Process]:
        """Workers have sessions of their own and outlive a killed agent: find them by the mark."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # ended meanwhile, or not ours

    def __enter__(self) -> TracedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


PHASES = ("detection", "worker_stop", "re_forming", "worker_start", "first_step")


def phases(agents: Sequence[TracedAgent], event_s: float) -> dict[str, float]:
    """Split the time from an event to the first step, along the slowest of ``agents`` each time.

    detection: until the last of them begins to stop its workers; worker_stop: until all workers
    have ended; re_forming: until the last holds its new rank; worker_start: until the last new
    worker has imported torch; first_step: until the last has made a step. An agent may go through
    this more than once: the last time counts, and what came before is in ``re_forming``. They sum
    up to ``total``. ``restarts`` is how many of ``--max-restarts`` an agent has used up, at most.
    ``loss_known`` is until the first of them has noted that a node is dead, if one did.
    """
    restarts = max(_restarts(agent, event_s) for agent in agents)
    known = [
        note.time_s - event_s
        for agent in agents
        for note in agent.notes()
        if note.event == "loss_known" and note.time_s > event_s
    ]
    begins, stops, joined, started, stepped = [], [], [], [], []
    for agent in agents:
        notes = [note for note in agent.notes() if note.time_s > event_s]
        stop = [n.time_s for n in notes if n.event == "stop_begin"]
        end = [n.time_s for n in notes if n.event == "stop_end"]
        if stop and end:  # a newcomer has nothing to stop
            begins.append(stop[0])
            stops.append(end[0])
        newest = {n.pid: n.time_s for n in notes if n.event == "worker_ready"}
        first: dict[int, float] = {}
        for note in notes:
            if note.event == "step" and note.pid in newest:
                first.setdefault(note.pid, note.time_s)
        last_ready_s = max(newest[pid] for pid in first)
        joined.append(
            max(n.time_s for n in notes if n.event == "rendezvous_end" and n.time_s < last_ready_s)
        )
        started.append(last_ready_s)
        stepped.append(max(first.values()))
    moments = [event_s]
    for times in (begins, stops, joined, started, stepped):
        moments.append(max([*times, moments[-1]]))
    spans = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return {
        **dict(zip(PHASES, spans, strict=True)),
        "new_ranks": moments[3] - event_s,
        "total": moments[-1] - event_s,
        "restarts": restarts,
        **({"loss_known": min(known)} if known else {}),
    }


def _restarts(agent: TracedAgent, event_s: float) -> int:
    begun = [note for note in agent.notes() if note.event == "worker_begin"]
    before = [note.restarts for note in begun if note.time_s <= event_s]
    return max(note.restarts for note in begun) - max(before, default=0)
