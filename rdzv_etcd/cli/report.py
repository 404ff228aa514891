"""What a job's state means to an operator: one verdict, one row per node, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.cli.jobs import Job
from rdzv_etcd.cli.output import CLOSED_OR_UNKNOWN, WAITS, WORKS, ago, duration
from rdzv_etcd.etcd.port import LeaseLeft
from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol import describe
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.job_state import NodeState, Role, Stage
from rdzv_etcd.text import many, shown
from rdzv_etcd.world_change import lost, reason_to_leave

_NAMED = 4


class State(Enum):
    """The verdict on a job."""

    WORKS = "works"
    WAITS = "waits"
    CLOSED = "closed"
    GONE = "gone"
    """All its nodes died, or left, and none of them closed it."""
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        return {State.WORKS: WORKS, State.WAITS: WAITS}.get(self, CLOSED_OR_UNKNOWN)


@dataclass(frozen=True, slots=True)
class Row:
    """One node."""

    node_id: str
    name: str
    rank: int | None
    state: str
    """One of: works, finished, arrived, coming back, spare, expelled, left, lost, stranger, idle,
    finishing, gone, corrupt."""
    why: str = ""
    address: str = ""
    heard: LeaseLeft | None = None
    leads: bool = False
    leaves: str = ""
    """Why it is being drained, if it is."""

    @property
    def is_overdue(self) -> bool:
        """A lease is renewed every third of its TTL; etcd reports whole seconds."""
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


def report_on(job: Job) -> Report:
    """Judge a job."""
    report = _judged(job)
    details = list(report.details)
    if job.state.incomplete and report.rows:
        details.append(describe.incomplete_text(job.state.incomplete))
    drained = [f"{job.names(node)} ({leaves(job, node)})" for node in sorted(job.drains)]
    if drained:
        details.append(f"being drained: {first_of(drained)}")
    refused = refused_with_help(job)
    if refused is not None:
        details.append(refused[0])
        if job.is_empty:  # then it is the right job
            report = replace(report, next_step=refused[1])
    return replace(report, details=tuple(details))


def _judged(job: Job) -> Report:
    control, state = job.control, job.state
    if state.settings is None:
        return _without_nodes(job)
    rows = tuple(_rows(job)) if job.is_complete else ()
    if state.closure is not None and not (set(state.waiting) - set(state.members)):
        return Report(job.job, State.CLOSED, how_it_ended(job), rows=rows)
    if state.stage is Stage.WORKING and (job.count or not job.is_complete):
        return _working(job, rows)
    here = len(state.waiting) if job.is_complete else job.count
    head = f"for round {control.next_number}: {describe.count_text(here, state.settings)}"
    details = _waiting_details(job, rows)
    short, next_step = state.settings.min_nodes - here, ""
    if short > 0:
        gone = [row.node_id for row in rows if row.state in ("lost", "left")]
        one = "a node" if short == 1 else f"{short} nodes"
        instead = f" instead of {some(job, gone)}" if gone else ""
        next_step = f"start {one}{instead} with --rdzv-id={shown(job.job)}, or close the job"
    return Report(job.job, State.WAITS, head, tuple(details), rows, next_step)


def _without_nodes(job: Job) -> Report:
    if job.is_gone:
        see = f"see rdzv-etcd history {shown(job.job)}"
        return Report(job.job, State.GONE, how_it_ended(job), next_step=see)
    if job.control.ended:
        return Report(job.job, State.CLOSED, how_it_ended(job))
    if not job.is_complete:  # and their settings would be the leader's
        text = f"for a leader: {many(job.count, 'node')} present, and none of them leads yet"
        return Report(job.job, State.WAITS, text, next_step="ask again; --all lists the nodes")
    corrupt = tuple(_corrupt(job))
    if corrupt:
        text = f"{many(len(corrupt), 'key')} found that no node of this library wrote"
        return Report(job.job, State.UNKNOWN, text, rows=corrupt)
    text = f"nothing is recorded for it under {job.keys.prefix}"
    hint = "check that --rdzv-id, --rdzv-endpoint and etcd_prefix match the agents'"
    return Report(job.job, State.UNKNOWN, text, next_step=hint)


def _working(job: Job, rows: tuple[Row, ...]) -> Report:
    state, formed = job.state, job.control.formed
    if formed is None:
        raise AssertionError("a job that works has a round")
    head = (
        f"round {state.round}, {describe.count_text(formed.size, formed.settings)}, master "
        f"{state.master_address}:{state.master_port}, epoch {state.epoch}"
    )
    details = []
    if not rows and job.count:
        details.append(f"{many(job.count, 'node')} present; --all lists them")
    if state.missing and rows:
        details.append(f"not declared lost yet: {some(job, list(state.missing))}")
    if state.spares:
        details.append(f"spares: {some(job, state.spares)}")
    return Report(job.job, State.WORKS, head, tuple(details), rows)


def _waiting_details(job: Job, rows: Sequence[Row]) -> Iterator[str]:
    control, state = job.control, job.state
    change = control.open_change
    if change is not None:
        yield f"round {change.round} is over: {describe.text_of_change(change, job.names)}"
    elif control.formed is not None:
        yield (
            f"round {state.round} was formed, but all its nodes are gone; its keys will expire "
            "with their leases"
        )
    elif control.ended:
        yield f"the last run {how_it_ended(job)}"
    infos = [job.nodes.present[node_id].info for node_id in state.waiting]
    clocks = [info.clock_us for info in infos if info.clock_us]
    if clocks and control.formed is None:
        yield f"the first of them joined {ago(min(clocks) / 1e6)}"
    for word, text in (
        ("coming back", "not back yet"),
        ("stranger", "not counted, because started with other settings"),
    ):
        found = [row.node_id for row in rows if row.state == word]
        if found:
            yield f"{text}: {some(job, found)}"


def how_it_ended(job: Job) -> str:
    """How the last run ended; empty if it has not, or there was none."""
    if job.is_gone:
        return describe.GONE
    closure = job.state.closure or job.state.last_end
    return "" if closure is None else describe.closed_text(closure, ago(closure.wall_s), job.names)


def leaves(job: Job, node_id: str) -> str:
    """Why a node is being drained; empty if it is not."""
    drain = job.control.drains.get(node_id)
    return "" if drain is None else shown(why_drained(drain, node_id))


def refused_with_help(job: Job) -> tuple[str, str] | None:
    """Which node could not join lately, and what to do about it."""
    refused = describe.refused_lately(job.control, job.state.settings)
    if refused is None:
        return None
    text = describe.refused_text(refused, job.names, ago(refused.wall_s))
    return text, describe.refused_help(refused)


def some(job: Job, node_ids: Sequence[str]) -> str:
    """Name some nodes, and count the others."""
    return job.names.all(node_ids, _NAMED)


def first_of(words: Sequence[str], most: int = _NAMED, separator: str = ", ") -> str:
    """Join the first of them, and count the others."""
    more = len(words) - most
    return separator.join(words[:most]) + (f" and {more} more" if more > 0 else "")


def lost_after(name: str, how: str, after_s: float | None) -> str:
    """How a node was lost, and how long after its end, if that is known."""
    after = "" if after_s is None else f", {duration(after_s)} after its end"
    return f"{lost(name, how)}{after}"


# --- rows -----------------------------------------------------------------------------------------


def _rows(job: Job) -> Iterator[Row]:
    state = job.state
    there = {node.node_id: node for node in state.nodes}
    ranks = {node_id: rank for rank, node_id in enumerate(state.members)}
    for node_id in dict.fromkeys((*state.members, *there)):
        if is_unknown(node_id):
            continue
        node = there.get(node_id)
        word, why = _standing(job, node_id, node)
        yield Row(
            node_id,
            job.names(node_id),
            ranks.get(node_id),
            word,
            why,
            "" if node is None else node.address,
            None if node is None else job.left.get(node_id),
            state.leader == node_id,
            leaves(job, node_id),
        )
    yield from (row for row in _corrupt(job) if row.node_id not in ranks)


_WORDS = {
    Role.MEMBER: "works",
    Role.RETURNING: "arrived",
    Role.WAITER: "arrived",
    Role.SPARE: "spare",
    Role.FINISHED: "finished",
    Role.LEAVING: "left",
    Role.STRANGER: "stranger",
    Role.IDLE: "idle",
}


def _standing(job: Job, node_id: str, node: NodeState | None) -> tuple[str, str]:
    """Return what a node is to its job, in a word, and why, if more is known."""
    state, record = job.state, job.control.round
    if state.closure is not None and node_id in state.members:
        return ("gone" if node is None else "finishing"), ""
    if node is None:
        how = state.missing.get(node_id, "gone")
        reason = reason_to_leave(how)
        return ("lost", how) if reason is None else ("left", reason)
    if node.role is Role.MEMBER and state.stage is Stage.CHANGING:
        return "coming back", ""
    if node.role is Role.IDLE and record is not None and node_id in record.expelled:
        return "expelled", "did not rejoin in time"
    info = job.nodes.present[node_id].info
    is_full = state.stage is Stage.WORKING and len(state.members) >= info.settings.max_nodes
    lacking = state.incomplete.get(node.domain or "")
    waits = "" if lacking is None else describe.segment_text(node.domain or "", *lacking)
    lacks = ", without domain_key" if info.settings.has_segments and not info.domain else ""
    why = {
        Role.SPARE: describe.ALL_SEATS if is_full else waits,
        Role.FINISHED: "waits for the others",
        Role.LEAVING: info.leaving or "",
        Role.STRANGER: f"started with {info.settings}{lacks}",
    }
    return _WORDS[node.role], why.get(node.role, "")


def _corrupt(job: Job) -> Iterator[Row]:
    for node_id, problem in job.state.unreadable.items():
        yield Row(node_id, job.names(node_id), None, "corrupt", problem)
