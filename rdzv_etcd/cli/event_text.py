"""Events of a job for people, and for scripts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdzv_etcd.cli.output import duration
from rdzv_etcd.names import display_name, names_apart
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
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import WorldChange

_RANKS = 8
_REMEMBERED = 50_000


class Names:
    """What nodes are called: by their host, and by their pid as well where a host has had two."""

    def __init__(self, *, with_pids: bool = False) -> None:
        """``with_pids``: always."""
        self._with_pids = with_pids
        self._seen: dict[str, str] = {}
        """The first node of each host."""

    def __call__(self, node_id: str) -> str:
        host = display_name(node_id)
        if len(self._seen) > _REMEMBERED:
            self._seen.clear()
        if self._with_pids or self._seen.setdefault(host, node_id) != node_id:
            return names_apart(node_id, host)[0]
        return host


def lines_of(event: JobEvent, name: Names) -> Iterator[str]:
    """Say what has happened, in a line, or two."""
    if isinstance(event, Snapshot):
        state = event.state
        yield f"{state.stage.value}: round {state.round}, {len(state.nodes)} nodes are there"
    elif isinstance(event, Joined):
        yield f"{name(event.node)} arrived"
    elif isinstance(event, NodeMissing):
        yield f"{name(event.node)} is missing: {shown(event.how)}"
    elif isinstance(event, NodeLost):
        after = "" if event.after_s is None else f", told {duration(event.after_s)} after its end"
        yield f"{name(event.node)} lost ({shown(event.how)}){after}"
    elif isinstance(event, NodeLeft):
        yield f"{name(event.node)} left: {shown(event.reason)}"
    elif isinstance(event, WorldFormed):
        took = "" if event.formed_in_s is None else f", formed in {duration(event.formed_in_s)}"
        yield f"round {event.round}: {event.size} nodes{took}, epoch {event.epoch}"
        if event.members:
            yield f"by rank: {', '.join(map(name, event.members[:_RANKS]))}{_more(event.members)}"
    elif isinstance(event, WorldOver):
        why = "" if event.change is None else f": {shown(event.change, 500)}"
        yield f"round {event.round} is over{why}"
    elif isinstance(event, JobEnded):
        how = "finished" if event.succeeded else "failed"
        yield f"the job {how}: {name(event.by)} says {shown(event.reason)}"
    elif isinstance(event, Missed):
        yield f"{event.count} events were missed"


def _more(members: tuple[str, ...]) -> str:
    return f" and {len(members) - _RANKS} more" if len(members) > _RANKS else ""


def event_fields(event: JobEvent) -> dict[str, object]:
    """What ``--json`` prints of an event; docs/cli.md describes it."""
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    fields: dict[str, object] = {"type": kind, "wall_s": event.wall_s}
    if isinstance(event, Snapshot):
        return fields | _state_fields(event.state)
    if isinstance(event, WorldOver):
        change = _change_fields(event.change)
        return fields | {"round": event.round, "epoch": event.epoch, "change": change}
    names = (name for kind in type(event).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in names:
        if name not in ("at_s", "wall_s"):
            value = getattr(event, name)
            fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def _state_fields(state: JobState) -> dict[str, object]:
    return {
        "stage": state.stage.value,
        "round": state.round,
        "epoch": state.epoch,
        "members": list(state.members),
        "nodes": [node.node_id for node in state.nodes],
        "missing": dict(state.missing),
    }


def _change_fields(change: WorldChange | None) -> dict[str, object] | None:
    return None if change is None else {"type": type(change).__name__.lower(), "text": str(change)}
