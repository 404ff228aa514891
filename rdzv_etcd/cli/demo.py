"""``rdzv-etcd demo``: an etcd, three torchrun agents, one killed and one added, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.demo_agents import Agents, DemoError, Step
from rdzv_etcd.cli.watch import LiveView, follow
from rdzv_etcd.embedded import ensure_etcd
from rdzv_etcd.protocol.events import JobEvent, WorldFormed
from rdzv_etcd.settings import Settings, settings_from_config

_JOB = "demo"
_STEPS = 60
"""In each world."""
_NOTE_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a change of the world cost."""

    what: str
    size: int
    """Of the world after it."""
    formed_s: float | None
    """From the kill, or else from the last step of the world before, until a world was formed …"""
    took_s: float
    """… and until it trained: in between, workers start Python and torch."""
    steps_again: int
    """How many steps were done again."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON: see docs/cli.md.")
def demo(*, as_json: bool) -> int:
    """Train a small network elastically on this machine, and see what a lost node costs.

    Starts an etcd and three torchrun agents, kills one, adds one, and shows what happens. Takes a
    minute or two, needs no network, and leaves nothing behind.

    \b
    Exit code: 0 it went as it should, 1 it did not.
    """
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the demo needs torch in this Python")
    # What still ends writes there until it has ended.
    place = tempfile.TemporaryDirectory(prefix="rdzv-etcd-demo-", ignore_cleanup_errors=True)
    with _an_etcd() as settings, place as folder:
        recoveries, last = asyncio.run(_run(settings, Path(folder), as_json))
    if as_json:
        fields = [
            {
                "what": each.what,
                "size": each.size,
                "formed_s": None if each.formed_s is None else round(each.formed_s, 3),
                "took_s": round(each.took_s, 3),
                "steps_again": each.steps_again,
            }
            for each in recoveries
        ]
        result = {"accuracy": round(last.accuracy, 4), "steps": last.step, "recoveries": fields}
        output.show_json("demo", result)
    else:
        _show(recoveries, last)
    return output.DONE


@contextmanager
def _an_etcd() -> Iterator[Settings]:
    """An etcd of our own on a free port; ended, and its data removed, at the end."""
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


async def _run(settings: Settings, folder: Path, as_json: bool) -> tuple[list[Recovery], Step]:
    agents = Agents(settings.connection.endpoints[0].target, _JOB, folder)
    # With JSON the result is all there is to see.
    with DemoView(is_quiet=as_json, with_pids=True) as view:
        following = asyncio.create_task(follow(settings, view, until_ended=False))
        try:
            return await Play(agents, view, folder).play()
        finally:
            await agents.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


class DemoView(LiveView):
    """Notes also when each world was formed."""

    formed_s: float | None = None

    def tell(self, event: JobEvent) -> None:
        super().tell(event)
        if isinstance(event, WorldFormed):
            self.formed_s = event.wall_s


class Play:
    """What happens, in its order."""

    def __init__(self, agents: Agents, view: DemoView, folder: Path) -> None:
        self._agents = agents
        self._view = view
        self._folder = folder
        self._noted_s = 0.0
        self._last_s = 0.0
        self._last_step = 0
        """Of the world before: when its last step was, and which."""

    async def play(self) -> tuple[list[Recovery], Step]:
        """Return what each change cost, and the last step. Raises DemoError."""
        agents = self._agents
        for name in ("a", "b", "c"):
            pid = await agents.start(name)
            self._view.say(f"started torchrun agent {name}, pid {pid}", style="bold")
        step = await self._train(await self._first(3, 0))

        self._view.say("killing agent c: SIGKILL", style="bold")
        killed_s = time.time()
        agents.kill("c")
        first = await self._first(2, step.epoch)
        lost = self._cost("agent c killed", first, killed_s)
        step = await self._train(first)

        pid = await agents.start("d")
        self._view.say(f"started torchrun agent d, pid {pid}", style="bold")
        first = await self._first(3, step.epoch)
        added = self._cost("agent d added", first, self._last_s)
        await self._train(first)

        self._view.say("that was all: letting the training finish", style="bold")
        (self._folder / "finish").touch()
        await agents.finished()
        last = await agents.last_step()
        if last is None:
            raise DemoError("no step was reported")
        return [lost, added], last

    async def _train(self, first: Step) -> Step:
        """Let the world of this step train for a while."""
        return await self._agents.until(lambda now: now.step >= first.step + _STEPS, self._note)

    async def _first(self, size: int, epoch: int) -> Step:
        """Wait for the first step of a later world of that size; note when the last one before it
        was."""
        self._last_s = self._agents.last.wall_s if self._agents.last else time.time()
        self._last_step = self._agents.last.step if self._agents.last else 0

        def look(now: Step) -> None:
            self._note(now)
            if now.epoch <= epoch:
                self._last_s = max(self._last_s, now.wall_s)
                self._last_step = max(self._last_step, now.step)

        return await self._agents.until(lambda now: now.epoch > epoch and now.size == size, look)

    def _cost(self, what: str, first: Step, since_s: float) -> Recovery:
        again = max(0, self._last_step - first.resumed)
        formed_s = self._view.formed_s
        formed_s = None if formed_s is None or formed_s < since_s else formed_s - since_s
        cost = Recovery(what, first.size, formed_s, first.wall_s - since_s, again)
        self._view.say(
            f"{what}: the world of {cost.size} trains after {output.duration(cost.took_s)}, "
            f"{again} steps are done again",
            style="bold",
        )
        return cost

    def _note(self, step: Step) -> None:
        now_s = time.monotonic()
        if now_s > self._noted_s + _NOTE_EVERY_S:
            self._noted_s = now_s
            self._view.note(
                f"step {step.step}  loss {step.loss:.3f}  accuracy {step.accuracy:.1%}  "
                f"world of {step.size}"
            )


def _show(recoveries: list[Recovery], last: Step) -> None:
    rows = [
        (
            each.what,
            each.size,
            "-" if each.formed_s is None else output.duration(each.formed_s),
            output.duration(each.took_s),
            each.steps_again,
        )
        for each in recoveries
    ]
    columns = ("WHAT HAPPENED", "NODES", "NEW WORLD AFTER", "TRAINS AFTER", "STEPS DONE AGAIN")
    output.console().print(output.table(columns, rows), soft_wrap=True)
    output.say(f"accuracy {last.accuracy:.1%} after {last.step} steps", "bold")
