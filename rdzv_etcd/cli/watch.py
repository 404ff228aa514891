"""``rdzv-etcd watch``: the events of a job, and its state meanwhile. Writes nothing to etcd.

Events come from a watch. The table is read again after them, and every few seconds, because nothing
shows when etcd last heard of a node.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator
from types import TracebackType

import click
from rich.console import Group, RenderableType
from rich.live import Live

from rdzv_etcd.cli import output
from rdzv_etcd.cli.jobs import connected, read_job, watching
from rdzv_etcd.cli.options import JobTarget, common
from rdzv_etcd.cli.output import duration
from rdzv_etcd.cli.report import lost_after, report_on
from rdzv_etcd.cli.status import render
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError, StateCorruptError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.names import Names
from rdzv_etcd.protocol.events import (
    JobEnded,
    JobEvent,
    Joined,
    Missed,
    NodeLeft,
    NodeLost,
    NodeMissing,
    Snapshot,
    WorldFormed,
    WorldOver,
)
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import many
from rdzv_etcd.world_change import end_text, left, may_be_gone, text_of

_READ_AGAIN_S = 5.0
_READ_SOONEST_S = 0.5
"""After a read, however much happens."""
_READ_LIMIT_S = 5.0


@click.command()
@click.argument("job", required=False)
@click.option(
    "--until-ended",
    is_flag=True,
    help="Exit when a run of the job ends: with 0 if it finished, with 1 if it failed.",
)
@common
def watch(*, job: str | None, until_ended: bool, target: JobTarget) -> int:
    """Show what happens in JOB, as it happens, and on a terminal a table of its nodes.

    With --json, each event is an object on a line of its own. Stop it with Ctrl-C.
    """
    settings = target.settings(target.job(job))
    return asyncio.run(_watch(settings, until_ended, target.as_json))


async def _watch(settings: Settings, until_ended: bool, as_json: bool) -> int:
    with LiveView(as_json=as_json) as view:
        return await follow(settings, view, until_ended=until_ended)


async def follow(settings: Settings, view: LiveView, *, until_ended: bool) -> int:
    """Show what happens until it is cancelled, or the end of a run; returns the exit code.

    Raises EtcdError, StateCorruptError if it cannot begin.
    """
    keys = JobKeys(settings.prefix, settings.job_id)
    limit_s = settings.connection.request_timeout_s
    clock = SystemClock()
    async with connected(settings) as etcd, watching(etcd, keys, limit_s) as events:
        read_s, due_s = -math.inf, 0.0
        while True:
            event = await events.next(max(0.0, due_s - clock.now_s()))
            if event is not None:
                view.show(event)
                if until_ended and isinstance(event, JobEnded):
                    return output.DONE if event.succeeded else output.FAILED
                due_s = min(due_s, max(clock.now_s(), read_s + _READ_SOONEST_S))
            if clock.now_s() < due_s:
                continue
            read_s = clock.now_s()
            await view.refresh(etcd, keys)
            due_s = clock.now_s() + _READ_AGAIN_S


class LiveView:
    """Prints events, with a table below them on a terminal."""

    def __init__(
        self, *, as_json: bool = False, is_quiet: bool = False, with_pids: bool = False
    ) -> None:
        """``is_quiet``: show nothing at all; ``with_pids``: name nodes with their pids."""
        self._is_quiet = is_quiet
        self._names = Names(with_pids=with_pids)
        self._console = output.console()
        has_table = self._console.is_terminal and not (as_json or is_quiet)
        self._live = Live(console=self._console, auto_refresh=False) if has_table else None
        self._as_json = as_json
        self._is_first = True
        self._problem = ""
        self._parts: list[RenderableType] = []
        self._note: RenderableType = ""
        self.formed_s = 0.0
        """When the last world was formed, by its leader's clock."""

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: JobEvent) -> None:
        """Print an event."""
        if isinstance(event, WorldFormed):
            self.formed_s = event.wall_s
        if isinstance(event, Snapshot):
            state = event.state
            self._names.learn([*state.members, *(node.node_id for node in state.nodes)])
        if self._as_json:
            output.show_json("event", event_fields(event))
            return
        if isinstance(event, Snapshot) and self._live is not None and self._is_first:
            self._is_first = False
            return  # the table shows it
        for number, words in enumerate(lines_of(event, self._names)):
            self.print_line(words, event.wall_s, is_first=number == 0)

    def print_line(
        self, words: str, wall_s: float | None = None, *, is_first: bool = True, style: str = ""
    ) -> None:
        """Print a line with the time; ``is_first``: of several that have the same."""
        if self._is_quiet:
            return
        when = time.strftime("%H:%M:%S", time.localtime(wall_s))
        stamp = when if is_first else " " * len(when)
        self._console.print(output.line(f"{stamp}  {words}", style), soft_wrap=True)

    def note(self, words: str) -> None:
        """Show a line below the table, if there is one, until there is another."""
        self._note = output.line(words)
        self._draw()

    async def refresh(self, etcd: Etcd, keys: JobKeys) -> None:
        """Read the job again for the table; without a table, check that etcd answers."""
        problem = ""
        try:
            work = read_job(etcd, keys, closely=True)
            job = await SystemClock().wait_for(work, _READ_LIMIT_S)
            self._parts = [*render(report_on(job), "")]
        except TimeoutError:
            problem = f"etcd does not answer within {_READ_LIMIT_S:g} s"
        except (EtcdError, StateCorruptError) as error:
            problem = str(error)
        if problem != self._problem:
            self._problem = problem
            text = f"not up to date: {problem}" if problem else "up to date again"
            if self._as_json:
                output.warn(text)
            else:
                self.print_line(text, style="yellow")
        self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(Group("", *self._parts, self._note), refresh=True)


# --- events --------------------------------------------------------------------------------------


def lines_of(event: JobEvent, name: Names) -> Iterator[str]:
    """Describe what has happened, in a line or two."""
    if isinstance(event, Snapshot):
        state = event.state
        yield f"{state.stage.value}: round {state.round}, {many(len(state.nodes), 'node')} present"
    elif isinstance(event, Joined):
        yield f"{name(event.node)} joined"
    elif isinstance(event, NodeMissing):
        yield may_be_gone(name(event.node), event.how)
    elif isinstance(event, NodeLost):
        yield lost_after(name(event.node), event.how, event.after_s)
    elif isinstance(event, NodeLeft):
        yield left(name(event.node), event.reason)
    elif isinstance(event, WorldFormed):
        took = "" if event.formed_in_s is None else f", formed in {duration(event.formed_in_s)}"
        yield f"round {event.round}: {many(event.size, 'node')}{took}, epoch {event.epoch}"
        if event.members:
            yield f"by rank: {name.all(event.members)}"
    elif isinstance(event, WorldOver):
        why = "" if event.change is None else f": {text_of(event.change, name)}"
        yield f"round {event.round} is over{why}"
    elif isinstance(event, JobEnded):
        yield end_text(name(event.by), event.reason, succeeded=event.succeeded)
    elif isinstance(event, Missed):
        yield f"{many(event.count, 'event')} missed"


def event_fields(event: JobEvent) -> dict[str, object]:
    """What ``--json`` prints of an event; docs/cli.md describes it."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields: dict[str, object] = {"type": kind, "wall_s": event.wall_s}
    if isinstance(event, Snapshot):
        state = event.state
        return fields | {
            "stage": state.stage.value,
            "round": state.round,
            "epoch": state.epoch,
            "members": list(state.members),
            "nodes": [node.node_id for node in state.nodes],
            "missing": dict(state.missing),
        }
    if isinstance(event, WorldOver):
        change = event.change
        why = change and {"type": type(change).__name__.lower(), "text": str(change)}
        return fields | {"round": event.round, "epoch": event.epoch, "change": why}
    names = (name for kind in type(event).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in names:
        if name not in ("at_s", "wall_s"):
            value = getattr(event, name)
            fields[name] = list(value) if isinstance(value, tuple) else value
    return fields
