"""What a job's state means to an operator: one verdict, one row per node, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.cli.jobs import Job
from rdzv_etcd.cli.output import CLOSED_OR_UNKNOWN, WAITS, WORKS, ago
from rdzv_etcd.etcd.inspection import LeaseLeft
from rdzv_etcd.names import display_name, is_unknown
from rdzv_etcd.protocol.draining import why_drained
from rdzv_etcd.protocol.job_state import JobState, NodeState, Role, Stage, settings_of
from rdzv_etcd.protocol.model import Control, Round
from rdzv_etcd.protocol.wait_text import needed, refused_help, refused_lately, refused_text
from rdzv_etcd.protocol.world_end import change_text
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import reason_to_leave

_NAMED_IN_LINE = 4


class State(Enum):
    """The verdict on a job."""

    WORKS = "works"
    WAITS = "waits"
    CLOSED = "closed"
    GONE = "gone"
    """All its nodes died, or left, and nobody closed it."""
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


def report_on(view: Job) -> Report:
    """Judge a job."""
    report = _judged(view)
    refused = refused_with_help(view)
    if refused is None:
        return replace(report, details=(*report.details, *_to_leave(view)))
    if view.is_empty:  # then it is the right job
        report = replace(report, next_step=refused[1])
    return replace(report, details=(*report.details, *_to_leave(view), refused[0]))


def _judged(view: Job) -> Report:
    control, state = view.control, view.state
    if state.settings is None:
        return _without_nodes(view)
    rows = tuple(_rows(view, state)) if view.is_complete else ()
    formed, change = control.formed, control.open_change
    newcomers = [node for node in state.nodes if node.role in (Role.WAITER, Role.SPARE)]
    if control.closure is not None and not newcomers:
        return Report(view.job, State.CLOSED, how_it_ended(view), rows=rows)
    if formed is not None and change is None and (view.count or not view.is_complete):
        return _working(view, state, formed, rows)
    return _waiting(view, state, state.settings, rows)


def how_it_ended(view: Job) -> str:
    """How the last run ended; empty if it has not, or there was none."""
    if view.is_gone:
        return "all its nodes died or left, and nobody closed it"
    has_ended = view.control.closure is not None or view.control.ended
    return closed_text(view.control) if has_ended else ""


def closed_text(control: Control) -> str:
    """How the last run that was closed ended."""
    closure = control.closure or control.ended[-1].closure
    how = "finished" if closure.succeeded else "failed"
    by = display_name(closure.by)
    return f"{how}: closed by {by} {ago(closure.wall_s)}: {shown(closure.reason)}"


def _without_nodes(view: Job) -> Report:
    if view.is_gone:
        see = f"see rdzv-etcd history {shown(view.job)}"
        return Report(view.job, State.GONE, how_it_ended(view), next_step=see)
    if view.control.ended:
        return Report(view.job, State.CLOSED, how_it_ended(view))
    if not view.is_complete:  # and their settings would be the leader's
        text = f"for a leader: {view.count} nodes are there, and none of them leads yet"
        return Report(view.job, State.WAITS, text, next_step="ask again; --all lists the nodes")
    corrupt = tuple(_corrupt(view))
    if corrupt:
        text = f"{len(corrupt)} keys are there, and no node has written any of them"
        return Report(view.job, State.UNKNOWN, text, rows=corrupt)
    text = f"nothing is recorded for it under {view.keys.prefix}"
    hint = "check that --rdzv-id, --rdzv-endpoint and etcd_prefix match the agents'"
    return Report(view.job, State.UNKNOWN, text, next_step=hint)


def _working(view: Job, state: JobState, formed: Round, rows: tuple[Row, ...]) -> Report:
    head = (
        f"round {formed.number}, {formed.size} of {needed(formed.settings)} nodes, master "
        f"{formed.master_address}:{formed.master_port}, epoch {state.epoch}"
    )
    details = []
    if not rows and view.count:
        details.append(f"{view.count} nodes are there; --all lists them")
    if state.missing and rows:
        details.append(f"not declared lost yet: {some(list(state.missing))}")
    if state.spares:
        details.append(f"spares: {some(state.spares)}")
    return Report(view.job, State.WORKS, head, tuple(details), rows)


def _waiting(view: Job, state: JobState, settings: JobSettings, rows: tuple[Row, ...]) -> Report:
    control = view.control
    here = len(state.waiting) if view.is_complete else view.count
    head = f"for round {control.next_number}: {here} of {needed(settings)} nodes"
    details = []
    change, formed = control.open_change, control.formed
    if change is not None:
        details.append(f"round {change.round} ended: {change_text(change)}")
    elif formed is not None:
        details.append(
            f"round {formed.number} was formed, but all its nodes are gone; its keys will expire "
            "with their leases"
        )
    elif control.ended:
        details.append(f"the last run {closed_text(control)}")
    infos = [view.nodes.present[node_id].info for node_id in state.waiting]
    clocks = [info.clock_us for info in infos if info.clock_us]
    if clocks and formed is None:
        details.append(f"the first of them came {ago(min(clocks) / 1e6)}")
    gone = [row.node_id for row in rows if row.state in ("lost", "left")]
    late = [row.node_id for row in rows if row.state == "coming back"]
    strangers = [row.node_id for row in rows if row.state == "stranger"]
    if late:
        details.append(f"not back yet: {some(late)}")
    if strangers:
        details.append(f"not counted, because started with other settings: {some(strangers)}")
    return Report(
        view.job, State.WAITS, head, tuple(details), rows, _what_helps(view, settings, here, gone)
    )


def _to_leave(view: Job) -> Iterator[str]:
    told = [f"{display_name(node)} ({leaves(view, node)})" for node in sorted(view.drains)]
    if told:
        yield f"to leave: {_first(told)}"


def leaves(view: Job, node_id: str) -> str:
    """Why a node is to leave; empty if it is not."""
    drain = view.control.drains.get(node_id)
    return "" if drain is None else shown(why_drained(drain, node_id))


def refused_with_help(view: Job) -> tuple[str, str] | None:
    """Which node could not join lately, and what to do about it."""
    refused = refused_lately(view.control, settings_of(view.control, view.nodes))
    if refused is None:
        return None
    return refused_text(refused, view.nodes.present, ago(refused.wall_s)), refused_help(refused)


def _first(words: Sequence[str]) -> str:
    more = len(words) - _NAMED_IN_LINE
    return ", ".join(words[:_NAMED_IN_LINE]) + (f" and {more} more" if more > 0 else "")


def _what_helps(view: Job, settings: JobSettings, here: int, gone: list[str]) -> str:
    short = settings.min_nodes - here
    if short <= 0:
        return ""
    one = "a node" if short == 1 else f"{short} nodes"
    instead = f" instead of {some(gone)}" if gone else ""
    return f"start {one}{instead} with --rdzv-id={shown(view.job)}, or end the job"


def some(node_ids: Sequence[str]) -> str:
    """Name some nodes, and say how many more there are."""
    return _first([display_name(node_id) for node_id in node_ids])


# --- rows -----------------------------------------------------------------------------------------


def _rows(view: Job, state: JobState) -> Iterator[Row]:
    there = {node.node_id: node for node in state.nodes}
    ranks = {node_id: rank for rank, node_id in enumerate(state.members)}
    for node_id in dict.fromkeys((*state.members, *there)):
        if is_unknown(node_id):
            continue
        node = there.get(node_id)
        word, why = _what_it_is(view, state, node_id, node)
        yield Row(
            node_id,
            ranks.get(node_id),
            word,
            why,
            "" if node is None else node.address,
            view.left.get(node_id) if node is not None else None,
            state.leader == node_id,
            leaves(view, node_id),
        )
    yield from (row for row in _corrupt(view) if row.node_id not in ranks)


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


def _what_it_is(
    view: Job, state: JobState, node_id: str, node: NodeState | None
) -> tuple[str, str]:
    """What a node is, in a word, and why, if there is more to say."""
    record = view.control.round
    if state.closure is not None and node_id in state.members:
        return ("gone" if node is None else "finishing"), ""
    if node is None:
        how = state.missing.get(node_id, "gone")
        reason = reason_to_leave(how)
        return ("lost", how) if reason is None else ("left", reason)
    info = view.nodes.present[node_id].info
    if node.role is Role.MEMBER and state.stage is Stage.CHANGING:
        return "coming back", ""
    if node.role is Role.IDLE and record is not None and node_id in record.expelled:
        return "expelled", "did not come back in time"
    is_full = state.stage is Stage.WORKING and len(state.members) >= info.settings.max_nodes
    why = {
        Role.SPARE: "all seats are taken" if is_full else "",
        Role.FINISHED: "waits for the others",
        Role.LEAVING: info.leaving or "",
        Role.STRANGER: f"started with {info.settings}",
    }
    return _WORDS[node.role], why.get(node.role, "")


def _corrupt(view: Job) -> Iterator[Row]:
    for node_id, problem in view.nodes.unreadable.items():
        yield Row(node_id, None, "corrupt", problem.problem)
