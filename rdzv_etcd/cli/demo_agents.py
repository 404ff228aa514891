"""The agents of ``rdzv-etcd demo``: real torchrun processes, and what their workers report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.text import shown

MARK = b"rdzv-etcd-demo "
"""As in :mod:`rdzv_etcd.cli.demo_training`, which imports torch."""
_CONF = "lease_ttl=5,last_call_timeout=10,closed_ttl=5,ended_ttl=5,orphans=kill"
_NNODES = "2:3"
_GRACE_S = 15.0
_LINES = 15
_PATIENCE_S = 180.0
"""torch alone takes half a minute to start on a busy laptop."""


class DemoError(RdzvEtcdError):
    """The demo did not go as it should; the message has an agent's last lines."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the training, as one worker reports it."""

    agent: str
    wall_s: float
    rank: int
    size: int
    epoch: int
    step: int
    resumed: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Ended:
    """An agent that has ended."""

    agent: str
    code: int


class Agents:
    """The agents of one job on this machine; :meth:`close` ends those that are left."""

    def __init__(self, endpoint: str, job: str, folder: Path) -> None:
        self._endpoint = endpoint
        self._job = job
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._said: dict[str, deque[str]] = {}
        self._news: asyncio.Queue[Step | Ended] = asyncio.Queue()
        self._may_end: set[str] = set()
        self.last: Step | None = None

    async def start(self, name: str) -> int:
        """Start an agent and return its process id."""
        self._said[name] = deque(maxlen=_LINES)
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the demo, which ends them
        )
        self._processes[name] = process
        self._readers.append(asyncio.create_task(self._read(name, process)))
        return process.pid

    def kill(self, name: str) -> None:
        """SIGKILL: it gets to say nothing. Its guard ends its worker."""
        self._may_end.add(name)
        self._processes[name].kill()

    async def until(self, wanted: Callable[[Step], bool], tell: Callable[[Step], None]) -> Step:
        """Wait for a step, and return it; ``tell`` is called for each one.

        Raises :class:`DemoError` if an agent ends, or nothing happens for minutes.
        """
        clock = SystemClock()
        until_s = clock.now_s() + _PATIENCE_S
        while True:
            try:
                news = await clock.wait_for(self._news.get(), until_s - clock.now_s())
            except TimeoutError:
                raise self._failed("nothing happened for minutes") from None
            if isinstance(news, Step):
                self.last = news
                tell(news)
                if wanted(news):
                    return news
            elif news.agent not in self._may_end:
                raise self._failed(f"agent {news.agent} ended with code {news.code}", news.agent)

    async def finished(self) -> None:
        """Wait until all agents that were not killed have ended well. Raises DemoError."""
        left = [name for name in self._processes if name not in self._may_end]
        self._may_end.update(left)
        for name in left:
            wait = self._processes[name].wait()
            try:
                code = await SystemClock().wait_for(wait, _PATIENCE_S)
            except TimeoutError:
                raise self._failed(f"agent {name} does not end", name) from None
            if code != 0:
                raise self._failed(f"agent {name} ended with code {code}", name)

    async def last_step(self) -> Step | None:
        """Return the last step that was reported by agents, all of which have ended."""
        await asyncio.gather(*self._readers)
        while not self._news.empty():
            news = self._news.get_nowait()
            self.last = news if isinstance(news, Step) else self.last
        return self.last

    async def close(self) -> None:
        living = [each for each in self._processes.values() if each.returncode is None]
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in living:
            try:
                await SystemClock().wait_for(process.wait(), _GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, name: str, process: Process) -> None:
        async for line in cast(asyncio.StreamReader, process.stdout):
            if line.startswith(MARK):
                with contextlib.suppress(ValueError, TypeError):
                    self._news.put_nowait(Step(agent=name, **json.loads(line[len(MARK) :])))
            elif line.strip():
                self._said[name].append(shown(line.decode(errors="replace").rstrip(), 300))
        self._news.put_nowait(Ended(name, await process.wait()))

    def _failed(self, what: str, agent: str | None = None) -> DemoError:
        names = [agent] if agent is not None else list(self._said)
        said = [line for name in names for line in list(self._said[name])[-4:]]
        return DemoError(f"the demo went wrong: {what}; it said last: {' | '.join(said)}")

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={_NNODES}"]
        command += ["--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=etcd3"]
        command += [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self._job}"]
        command += [f"--rdzv-conf={_CONF}", f"--log-dir={self._folder / 'logs'}"]
        return [*command, "-m", "rdzv_etcd.cli.demo_training", f"--folder={self._folder}"]


def _environment() -> dict[str, str]:
    """This process's, without what would change what torchrun does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return {**kept, "OMP_NUM_THREADS": "1"}
