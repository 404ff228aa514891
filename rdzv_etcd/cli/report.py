"""What a job's state means to an operator: one verdict, one row per node, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.cli.job_view import Gate, JobView
from rdzv_etcd.cli.output import CLOSED_OR_UNKNOWN, WAITS, WORKS, ago, duration
from rdzv_etcd.core.census import Census, take_census
from rdzv_etcd.core.draining import why_drained
from rdzv_etcd.core.gate import must_cool_down
from rdzv_etcd.core.job_state import settings_of, spares_in
from rdzv_etcd.core.model import Change, Control, Round
from rdzv_etcd.core.names import display_name, is_unknown
from rdzv_etcd.core.wait_text import kept_out, needed
from rdzv_etcd.etcd.inspection import LeaseLeft
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.text import shown

_NAMED_IN_LINE = 4


class State(Enum):
    """The verdict on a job."""

    WORKS = "works"
    WAITS = "waits"
    CLOSED = "closed"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        return {State.WORKS: WORKS, State.WAITS: WAITS}.get(self, CLOSED_OR_UNKNOWN)


@dataclass(frozen=True, slots=True)
class Row:
    """One node."""

    node_id: str
    rank: int | None
    state: str
    """One of: works, finished, arrived, coming back, spare, expelled, left, lost, stranger, idle,
    finishing, gone, corrupt."""
    why: str = ""
    address: str = ""
    heard: LeaseLeft | None = None
    leads: bool = False
    leaves: str = ""
    """Why it is to leave, if it is."""

    @property
    def is_overdue(self) -> bool:
        """A lease is renewed every third of its TTL; etcd tells whole seconds."""
        return self.heard is not None and self.heard.silent_s > self.heard.granted_s / 2 + 1


@dataclass(frozen=True, slots=True)
class Report:
    """What ``status`` shows."""

    job: str
    state: State
    headline: str
    details: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    next_step: str = ""


def report_on(view: JobView) -> Report:
    """Judge a job."""
    report = _judged(view)
    details = (*report.details, *_to_leave(view), *who_is_kept_out(view), *_not_passing(view))
    if view.gates.shown and view.is_empty:  # then it is the right job
        report = replace(report, next_step="mend what the gate of those hosts checks")
    return replace(report, details=details)


def _judged(view: JobView) -> Report:
    control = view.control
    settings = settings_of(view.control, view.nodes)
    if settings is None:
        return _without_nodes(view)
    census = take_census(control, view.nodes, settings)
    rows = tuple(_rows(view, settings, census)) if view.is_complete else ()
    formed, change = control.formed, control.open_change
    if control.closure is not None and not census.newcomers:
        return Report(view.job, State.CLOSED, closed_text(control), rows=rows)
    if formed is not None and change is None and (view.count or not view.is_complete):
        return _working(view, formed, rows)
    return _waiting(view, settings, census, rows)


def closed_text(control: Control) -> str:
    """How the last run ended."""
    closure = control.closure
    if closure is None and control.ended:
        closure = control.ended[-1].closure
    if closure is None:
        return "has not ended"
    how = "finished" if closure.succeeded else "failed"
    by = display_name(closure.by)
    return f"{how}: closed by {by} {ago(closure.wall_s)}: {shown(closure.reason)}"


def _without_nodes(view: JobView) -> Report:
    if view.control.ended:
        text = f"{closed_text(view.control)} (its record is gone)"
        return Report(view.job, State.CLOSED, text)
    if not view.is_complete:  # and their settings would be the leader's
        text = f"for a leader: {view.count} nodes are there, and none of them leads yet"
        return Report(view.job, State.WAITS, text, next_step="ask again; --all lists the nodes")
    corrupt = tuple(_corrupt(view))
    if corrupt:
        text = f"unknown: {len(corrupt)} keys are there, and no node has written any of them"
        return Report(view.job, State.UNKNOWN, text, rows=corrupt)
    text = f"unknown: etcd has no node, no round and no end of it under {view.keys.prefix}"
    hint = (
        "is the id (--rdzv-id) spelt as the agents have it, and is it their etcd, and their "
        "etcd_prefix?"
    )
    return Report(view.job, State.UNKNOWN, text, next_step=hint)


def _working(view: JobView, formed: Round, rows: tuple[Row, ...]) -> Report:
    size = formed.size
    head = (
        f"round {formed.number}, {size} of {needed(formed.settings)} nodes, master "
        f"{formed.master_address}:{formed.master_port}, epoch {view.control.epoch}"
    )
    details = []
    if not rows and view.count:
        details.append(f"{view.count} nodes are there; --all lists them")
    missing = [row.node_id for row in rows if row.state == "lost"]
    if missing:
        details.append(f"not declared lost yet: {some(missing)}")
    spares = [row.node_id for row in rows if row.state == "spare"]
    if spares:
        details.append(f"spares: {some(spares)}")
    return Report(view.job, State.WORKS, head, tuple(details), rows)


def _waiting(view: JobView, settings: JobSettings, census: Census, rows: tuple[Row, ...]) -> Report:
    control = view.control
    here = len(census.pool) if view.is_complete else view.count
    head = f"for round {control.next_number}: {here} of {needed(settings)} nodes"
    details = []
    change, formed = control.open_change, control.formed
    if change is not None:
        details.append(f"round {change.round} ended: {change_text(change)}")
    elif formed is not None:
        details.append(
            f"round {formed.number} is formed, but none of its nodes is there: its keys go with "
            "their lease"
        )
    elif control.closure is not None or control.ended:
        details.append(f"the last run {closed_text(control)}")
    clocks = [it.info.clock_us for it in census.newcomers if it.info.clock_us]
    if clocks and formed is None:
        details.append(f"the first of them came {ago(min(clocks) / 1e6)}")
    gone = [row for row in rows if row.state in ("lost", "left")]
    late = [row.node_id for row in rows if row.state == "coming back"]
    strangers = [row.node_id for row in rows if row.state == "stranger"]
    if late:
        details.append(f"not back yet: {some(late)}")
    if strangers:
        details.append(f"not counted, because started with other settings: {some(strangers)}")
    return Report(
        view.job, State.WAITS, head, tuple(details), rows, _what_helps(view, settings, here, gone)
    )


def _to_leave(view: JobView) -> Iterator[str]:
    told = [f"{display_name(node)} ({leaves(view, node)})" for node in sorted(view.drains)]
    if told:
        yield f"to leave: {_first(told)}"


def leaves(view: JobView, node_id: str) -> str:
    """Why a node is to leave; empty if it is not."""
    drain = view.control.drains.get(node_id)
    return "" if drain is None else shown(why_drained(drain, node_id))


def who_is_kept_out(view: JobView) -> Iterator[str]:
    """Whom other settings than the job's kept out lately."""
    settings = settings_of(view.control, view.nodes)
    stranger = settings and kept_out(view.control, settings, view.nodes.present)
    if stranger:
        name = display_name(stranger.node_id)
        yield f"{name} could not join ({ago(stranger.wall_s)}): started with {stranger.settings}"


def _not_passing(view: JobView) -> Iterator[str]:
    """The worst first."""
    gates = sorted(view.gates.shown, key=lambda gate: (-gate.failures.count, gate.host))
    for gate in gates[:_NAMED_IN_LINE]:
        yield gate_text(gate)
    more = len(gates[_NAMED_IN_LINE:]) + view.gates.more
    if more:
        yield f"{more} more hosts did not pass their gate"


def gate_text(gate: Gate) -> str:
    """How the nodes of a host fared, and when the next one may try."""
    failures, left_s = gate.failures, gate.forgotten_in_s
    how = f"{shown(gate.host, 100)} did not pass: {shown(failures.how)} ({ago(failures.wall_s)})"
    if not must_cool_down(failures):
        return how
    left = "" if left_s is None else f" for {duration(left_s)} more"
    return f"{how}, {failures.count} times in a row: cools down{left}"


def _first(words: Sequence[str]) -> str:
    more = len(words) - _NAMED_IN_LINE
    return ", ".join(words[:_NAMED_IN_LINE]) + (f" and {more} more" if more > 0 else "")


def _what_helps(view: JobView, settings: JobSettings, here: int, gone: list[Row]) -> str:
    short = settings.min_nodes - here
    if short <= 0:
        return ""
    one = "a node" if short == 1 else f"{short} nodes"
    names = some([row.node_id for row in gone])
    instead = f" instead of {names}" if names else ""
    return f"start {one}{instead} with --rdzv-id={shown(view.job)}, or end the job"


def change_text(change: Change) -> str:
    """Why a round is over."""
    parts = [f"{display_name(node)} lost ({shown(how)})" for node, how in change.lost.items()]
    parts = parts[:_NAMED_IN_LINE] + (
        [f"{len(parts) - _NAMED_IN_LINE} more lost"] if len(parts) > _NAMED_IN_LINE else []
    )
    if change.waiters:
        parts.append(_who_waits(change))
    if change.unnamed:
        parts.append(f"{change.unnamed} more")
    return ", ".join(parts)


def _who_waits(change: Change) -> str:
    told = [node for node in change.waiters if node in change.because][:_NAMED_IN_LINE]
    back = [f"{display_name(node)} came back ({shown(change.because[node])})" for node in told]
    others = [node for node in change.waiters if node not in told]
    return ", ".join([*back, *([f"{some(others)} waiting"] if others else [])])


def some(node_ids: Sequence[str]) -> str:
    """Name some nodes, and say how many more there are."""
    return _first([display_name(node_id) for node_id in node_ids])


# --- rows -----------------------------------------------------------------------------------------


def _rows(view: JobView, settings: JobSettings, census: Census) -> Iterator[Row]:
    control = view.control
    record = control.round
    members = record.members if record is not None else ()
    states = _states(view, settings, census)
    seen = set()
    ranks = {node_id: rank for rank, node_id in enumerate(members)}
    for node_id in (*members, *view.nodes.present, *view.nodes.accused):
        if node_id in seen or is_unknown(node_id):
            continue
        seen.add(node_id)
        state, why = states.get(node_id, ("idle", ""))
        presence = view.nodes.present.get(node_id)
        yield Row(
            node_id,
            ranks.get(node_id),
            state,
            why,
            "" if presence is None else presence.info.address,
            view.left.get(node_id) if presence is not None else None,
            control.leader is not None and control.leader.node_id == node_id,
            leaves(view, node_id),
        )
    yield from (row for row in _corrupt(view) if row.node_id not in seen)


def _corrupt(view: JobView) -> Iterator[Row]:
    for node_id, problem in view.nodes.unreadable.items():
        yield Row(node_id, None, "corrupt", problem.problem)


def _states(view: JobView, settings: JobSettings, census: Census) -> Mapping[str, tuple[str, str]]:
    control, nodes = view.control, view.nodes
    formed, change = control.formed, control.open_change
    is_over = change is not None
    lost = {} if change is None else dict(change.lost)
    states: dict[str, tuple[str, str]] = {}
    for node_id in nodes.accused:
        states[node_id] = ("lost", nodes.how_absent(node_id))
    for node_id in census.absent:
        states[node_id] = ("lost", lost.get(node_id, nodes.how_absent(node_id)))
    for node_id, reason in census.leaving.items():
        states[node_id] = ("left", reason)
    for node_id in census.expected:
        states[node_id] = ("coming back", "") if is_over else ("works", "")
    for node_id in census.finished:
        states[node_id] = ("finished", "waits for the others")
    for presence in census.returning:
        states[presence.info.node_id] = ("arrived", "")
    for presence in census.newcomers:
        states[presence.info.node_id] = ("arrived", "")
    for node_id in spares_in(control, census, settings):
        full = formed is not None and not is_over and formed.size >= settings.max_nodes
        states[node_id] = ("spare", "all seats are taken" if full else "")
    for presence in census.strangers:
        states[presence.info.node_id] = ("stranger", f"started with {presence.info.settings}")
    expelled = set() if control.round is None else set(control.round.expelled)
    for node_id in census.idle:
        is_expelled = node_id in expelled
        states[node_id] = ("expelled", "did not come back in time") if is_expelled else ("idle", "")
    if control.closure is not None:
        for node_id in () if control.round is None else control.round.members:
            is_there = node_id in nodes.present
            states[node_id] = ("finishing", "") if is_there else ("gone", "")
    return states
