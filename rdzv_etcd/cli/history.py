"""``rdzv-etcd history``: a job's rounds, as the leaders have noted them. Writes nothing to etcd.

Reads notes for people, not values of the protocol: what is not there, or not as it should be, is
left out, and what later versions add is shown as soon as it is there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.jobs import Job, connected, read_job
from rdzv_etcd.cli.options import JobTarget, common
from rdzv_etcd.cli.report import first_of, how_it_ended, lost_after, report_on
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.names import Names
from rdzv_etcd.node.views import read_pages
from rdzv_etcd.protocol.describe import lost_and_left
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Settings
from rdzv_etcd.world_change import left, rejoined

T = TypeVar("T")

_EMPTY: dict[str, Any] = {}

_LONGEST_NOTE = 1 << 20
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Note:
    """A round, as its leader has noted it; ``None``: unknown. ``--json`` prints this."""

    round: int
    run: str
    revision: int
    size: int | None = None
    because: str = ""
    open_s: float | None = None
    closed_by: str = ""
    last_arrival: str | None = None
    last_arrival_after_s: float | None = None
    wall_s: float | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    """The nodes that were lost before it, and how."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The nodes that left before it, and why."""
    back: tuple[str, ...] = ()
    """The nodes that were waiting when the round before it ended."""
    lost_after_s: Mapping[str, float] = field(default_factory=dict)
    """How long after their end they were declared lost, where that was seen."""
    back_because: Mapping[str, str] = field(default_factory=dict)
    """Why members rejoined, where they gave a reason: how their workers failed."""


@click.command()
@click.argument("job", required=False)
@common
def history(*, job: str | None, target: JobTarget) -> int:
    """Show the last rounds of JOB: how each was formed, and what ended the one before.

    Of each job the last 100 rounds are kept (option history), for a day beyond its end (ended_ttl).

    \b
    Exit code: 0, 2 nothing is known of the job, 3 etcd cannot be asked.
    """
    settings = target.settings(target.job(job))
    view, notes = asyncio.run(_read(settings))
    if target.as_json:
        ended = [{"run": run.origin, **asdict(run.closure)} for run in view.control.ended]
        rounds = [asdict(note) for note in notes]
        output.show_json("history", {"job": settings.job_id, "rounds": rounds, "ended": ended})
    else:
        _show(view, notes)
    return output.CLOSED_OR_UNKNOWN if view.is_empty and not notes else output.DONE


async def _read(settings: Settings) -> tuple[Job, list[Note]]:
    keys = JobKeys(settings.prefix, settings.job_id)
    async with connected(settings) as etcd:
        view = await read_job(etcd, keys)
        found = (await read_pages(etcd, keys.audits)).kvs
    notes = [note for note in map(read_note, found) if note is not None]
    return view, sorted(notes, key=lambda note: note.revision)


def read_note(kv: KeyValue) -> Note | None:
    """Read what of a note can be read; ``None`` if it is not a note."""
    try:
        raw = json.loads(kv.value[:_LONGEST_NOTE])
    except (ValueError, RecursionError):
        return None
    number = _number(raw, "round") if isinstance(raw, dict) else None
    if number is None:
        return None
    change = _field(raw, "change", _EMPTY)
    gone = {name: str(how) for name, how in _field(change, "lost", _EMPTY).items()}
    were_lost, have_left = lost_and_left(gone)
    latencies = _field(change, "lost_after_s", _EMPTY)
    size = _number(raw, "size")
    return Note(
        int(number),
        _field(raw, "run", ""),
        kv.mod_revision,
        None if size is None else int(size),
        _field(raw, "because", ""),
        _number(raw, "open_s"),
        _field(raw, "closed_by", ""),
        _field(raw, "last_arrival", "") or None,
        _number(raw, "last_arrival_after_s"),
        _number(raw, "wall_s"),
        were_lost,
        have_left,
        tuple(map(str, _field(change, "waiters", []))),
        {name: after_s for name in latencies if (after_s := _number(latencies, name)) is not None},
        {name: str(why) for name, why in _field(raw, "came_back", _EMPTY).items()},
    )


def _number(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 10**15 else None


def _field(raw: Mapping[str, Any], name: str, default: T) -> T:
    """Return a field, or the default if it has not that one's type."""
    value = raw.get(name)
    return value if isinstance(value, type(default)) else default


# --- for people -----------------------------------------------------------------------------------


def _show(job: Job, notes: Sequence[Note]) -> None:
    ended = how_it_ended(job)
    if not notes and not ended:
        report = report_on(job)
        output.print_line(
            f"no round of job {job.job!r} is known: {report.state.value} {report.headline}"
        )
        return
    names = job.names
    for note in notes:
        names.learn(filter(None, (*note.lost, *note.left, *note.back, note.last_arrival)))
    if notes:
        columns = ("ROUND", "WHEN", "NODES", "FORMED IN", "CLOSED BECAUSE", "LAST TO ARRIVE")
        rows = [_row(note, names) for note in notes]
        output.print_table((*columns, "ENDED THE ROUND BEFORE"), rows)
    if ended:
        output.print_line(ended)


def _row(note: Note, names: Names) -> tuple[object, ...]:
    return (
        note.round,
        None if note.wall_s is None else when(note.wall_s, time.time()),
        note.size,
        None if note.open_s is None else output.duration(note.open_s),
        note.because,
        note.last_arrival and names(note.last_arrival),
        what_ended(note, names),
    )


def when(wall_s: float, now_s: float) -> str:
    """A time of day, with its date unless that is today's; by this machine's time zone."""
    then, today = time.localtime(wall_s), time.localtime(now_s)
    is_today = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


def what_ended(note: Note, names: Names) -> str:
    """What ended the round before this one."""
    parts = [
        lost_after(names(node_id), how, note.lost_after_s.get(node_id))
        for node_id, how in note.lost.items()
    ]
    parts += [left(names(node_id), why) for node_id, why in note.left.items()]
    parts += [rejoined(names(node_id), why) for node_id, why in note.back_because.items()]
    others = [names(node_id) for node_id in note.back if node_id not in note.back_because]
    parts += [f"{name} joined" for name in others]
    return first_of(parts, _NAMED, "; ") or "-"
