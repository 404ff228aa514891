"""``rdzv-etcd demo``: an etcd, three torchrun agents, one killed and one added, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.watch import LiveView, follow
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.embedded.program import without_secrets
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings import Settings, settings_from_config
from rdzv_etcd.text import many, shown

MARK = b"rdzv-etcd-demo "
"""As in :mod:`rdzv_etcd.cli.demo_training`, which imports torch."""
_JOB = "demo"
_CONF = "lease_ttl=5,last_call_timeout=10,closed_ttl=5,ended_ttl=5,orphans=kill"
_STEPS = 60
"""In each world."""
_NOTE_EVERY_S = 0.2
_GRACE_S = 15.0
_PATIENCE_S = 180.0
"""torch alone takes half a minute to start on a busy laptop."""


class DemoError(RdzvEtcdError):
    """The demo did not go as planned; the message has the agents' last lines."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the training, as one worker reports it."""

    wall_s: float
    rank: int
    size: int
    epoch: int
    step: int
    resumed: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Retraining:
    """What a change of the world cost."""

    what: str
    size: int
    """Of the world after it."""
    formed_s: float | None
    """From the kill, or from the last step of the world before, until a world was formed."""
    took_s: float
    """The same until it trained: workers have to start Python and torch."""
    steps_again: int
    """How many steps were repeated."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: see docs/cli.md.")
def demo(*, as_json: bool) -> int:
    """Train a small network elastically on this machine, and see what a lost node costs.

    Starts an etcd and three torchrun agents, kills one, adds one, and shows what happens. Takes a
    minute or two, needs no network, and leaves nothing behind.

    \b
    Exit code: 0 it went as planned, 1 it did not.
    """
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo needs torch in this Python")
    # An agent that is being stopped still writes there.
    place = tempfile.TemporaryDirectory(prefix="rdzv-etcd-demo-", ignore_cleanup_errors=True)
    with _an_etcd() as settings, place as folder:
        recoveries, last = asyncio.run(_run(settings, Path(folder), as_json))
    if as_json:
        fields = [asdict(each) for each in recoveries]
        result = {"accuracy": round(last.accuracy, 4), "steps": last.step, "recoveries": fields}
        output.show_json("demo", result)
        return output.DONE
    rows = [
        (
            each.what,
            each.size,
            None if each.formed_s is None else output.duration(each.formed_s),
            output.duration(each.took_s),
            each.steps_again,
        )
        for each in recoveries
    ]
    columns = ("WHAT HAPPENED", "NODES", "NEW WORLD AFTER", "TRAINS AFTER", "STEPS REPEATED")
    output.print_table(columns, rows)
    output.print_line(f"accuracy {last.accuracy:.1%} after {last.step} steps", "bold")
    return output.DONE


@contextmanager
def _an_etcd() -> Iterator[Settings]:
    """An etcd of our own on a free port; its data is removed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = settings_from_config(
        endpoint=f"127.0.0.1:{port}",
        job_id=_JOB,
        min_nodes=2,
        max_nodes=3,
        local_addr=None,
        config={"embed": 1},
        environ={},
    )
    started = ensure_etcd(settings)
    try:
        yield settings
    finally:
        if started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.supervisor_pid, signal.SIGTERM)


async def _run(settings: Settings, folder: Path, as_json: bool) -> tuple[list[Retraining], Step]:
    with LiveView(is_quiet=as_json, with_pids=True) as view:  # with JSON only the result is shown
        play = Play(settings.connection.endpoints[0].target, view, folder)
        following = asyncio.create_task(follow(settings, view, until_ended=False))
        try:
            return await play.run()
        finally:
            await play.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class Play:
    """The agents of the demo and what is done to them; :meth:`close` ends those that are left."""

    def __init__(self, endpoint: str, view: LiveView, folder: Path) -> None:
        self._endpoint = endpoint
        self._view = view
        self._folder = folder
        self._agents: dict[str, Process] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._output: dict[str, str] = {}
        """The last line of each agent."""
        self._news: asyncio.Queue[Step | str] = asyncio.Queue()
        """Steps, and the names of agents that have ended."""
        self._last: Step | None = None
        self._noted_s = 0.0

    async def run(self) -> tuple[list[Retraining], Step]:
        """Play it. Raises DemoError."""
        for name in "abc":
            await self._start(name)
        await self._train(3)
        self._view.print_line("killing agent c: SIGKILL", style="bold")
        killed_s = time.time()
        self._agents.pop("c").kill()
        lost = await self._train(2, "agent c killed", killed_s)
        await self._start("d")
        added = await self._train(3, "agent d added")
        self._view.print_line("done: letting the training finish", style="bold")
        (self._folder / "finish").touch()
        while self._agents:
            await self._next()
        return [lost, added], cast(Step, self._last)

    async def _train(self, size: int, what: str = "", since_s: float = 0.0) -> Retraining:
        """Let a new world of that size train for a while; return what it cost to get there."""
        before, first = self._last, await self._next_step()
        epoch = 0 if before is None else before.epoch
        while first.epoch <= epoch or first.size != size:
            if before is not None and first.epoch == epoch:
                before = max(before, first, key=lambda step: step.step)
            first = await self._next_step()
        since_s = since_s or (first.wall_s if before is None else before.wall_s)
        formed_s = self._view.formed_s - since_s
        took_s = round(first.wall_s - since_s, 3)
        again = 0 if before is None else max(0, before.step - first.resumed)
        if what:
            self._view.print_line(
                f"{what}: the world of {size} trains after {output.duration(took_s)}, "
                f"{many(again, 'step')} repeated",
                style="bold",
            )
        while (await self._next_step()).step < first.step + _STEPS:
            pass
        return Retraining(what, size, round(formed_s, 3) if formed_s > 0 else None, took_s, again)

    async def _next_step(self) -> Step:
        while not isinstance(news := await self._next(), Step):
            raise self._failed(f"agent {news} ended")
        return news

    async def _next(self) -> Step | str:
        """Return the next step, or the name of an agent that has ended well."""
        try:
            news = await SystemClock().wait_for(self._news.get(), _PATIENCE_S)
        except TimeoutError:
            raise self._failed("nothing happened for minutes") from None
        if isinstance(news, str):
            agent = self._agents.pop(news, None)
            if agent is not None and agent.returncode != 0:
                raise self._failed(f"agent {news} ended with code {agent.returncode}")
            return news if agent is not None else await self._next()
        self._last = news
        if time.monotonic() > self._noted_s + _NOTE_EVERY_S:
            self._noted_s = time.monotonic()
            self._view.note(
                f"step {news.step}  loss {news.loss:.3f}  accuracy {news.accuracy:.1%}  "
                f"world of {news.size}"
            )
        return news

    async def _start(self, name: str) -> None:
        given = without_secrets(os.environ)  # they are for another etcd
        kept = {key: value for key, value in given.items() if not key.startswith("PET_")}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3"]
        command += ["--nproc-per-node=1", "--max-restarts=10", "--rdzv-backend=etcd3"]
        command += [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={_JOB}"]
        command += [f"--rdzv-conf={_CONF}", f"--log-dir={self._folder / 'logs'}"]
        command += ["-m", "rdzv_etcd.cli.demo_training", f"--folder={self._folder}"]
        agent = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={**kept, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the demo, which stops them
        )
        self._agents[name] = agent
        self._readers.append(asyncio.create_task(self._read(name, agent)))
        self._view.print_line(f"started torchrun agent {name}, pid {agent.pid}", style="bold")

    async def _read(self, name: str, agent: Process) -> None:
        async for line in cast(asyncio.StreamReader, agent.stdout):
            if line.startswith(MARK):
                with contextlib.suppress(ValueError, TypeError):
                    self._news.put_nowait(Step(**json.loads(line[len(MARK) :])))
            elif line.strip():
                self._output[name] = shown(line.decode(errors="replace").rstrip(), 300)
        await agent.wait()
        self._news.put_nowait(name)

    def _failed(self, what: str) -> DemoError:
        lines = " | ".join(f"{name}: {line}" for name, line in self._output.items())
        return DemoError(f"the demo failed: {what}; the agents' last lines: {lines}")

    async def close(self) -> None:
        """End the agents that are left."""
        left = [agent for agent in self._agents.values() if agent.returncode is None]
        for agent in left:
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGTERM)
        for agent in left:
            try:
                await SystemClock().wait_for(agent.wait(), _GRACE_S)
            except TimeoutError:
                agent.kill()
                await agent.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)
