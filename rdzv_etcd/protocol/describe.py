"""Words for the waits of a job, and for their outcomes. Pure.

The only place that has them: logs, errors, ``status``, ``watch``, ``history`` and ``doctor`` take
them from here. How a member was lost and why a world is over: :mod:`rdzv_etcd.world_change`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from rdzv_etcd.names import LOOKED_AT, Names, display_name, is_unknown
from rdzv_etcd.protocol.census import Census, missing, take_census
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Change, Closure, Control, Drain, Nodes, Refused
from rdzv_etcd.protocol.segments import incomplete, largest_world
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_ROUND
from rdzv_etcd.text import many, shown
from rdzv_etcd.world_change import Namer, change_text, first, reason_to_leave

_WHY_SHOWN = 400
_REASON_SHOWN = 500
_NAMED = 4
"""Domains that are named in one line."""


def names_in(
    control: Control, nodes: Nodes | None = None, *, looked_at: int | None = None
) -> Names:
    """Name nodes by the ids that are known of a job: all of them, or so many of each kind."""
    known = [known_ids(control)]
    if nodes is not None:
        known += [iter(nodes.present), iter(nodes.accused), iter(nodes.left)]
    return Names(node_id for each in known for node_id in islice(each, looked_at))


def known_ids(control: Control) -> Iterator[str]:
    """The ids of nodes in the control keys."""
    record, change = control.round, control.change
    yield from () if record is None else (each for each in record.members if not is_unknown(each))
    yield from () if change is None else (*change.lost, *change.waiters)
    if control.leader is not None:
        yield control.leader.node_id
    if control.refused is not None:
        yield control.refused.node_id


# --- why a world is over --------------------------------------------------------------------------


def lost_and_left(gone: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Separate the members that are gone according to a change: those that were lost, and how, and
    those that left, and why."""
    reasons = {node: reason_to_leave(how) for node, how in gone.items()}
    lost = {node: how for node, how in gone.items() if reasons[node] is None}
    return lost, {node: reason for node, reason in reasons.items() if reason is not None}


def text_of_change(change: Change, name: Namer) -> str:
    """Describe a published change."""
    lost_, left_ = lost_and_left(change.lost)
    return change_text(name, lost_, left_, change.waiters, change.because, unnamed=change.unnamed)


def closed_text(closure: Closure, when: str, name: Namer) -> str:
    """Describe how a run ended, as a verdict."""
    how = "finished" if closure.succeeded else "failed"
    return f"{how}: closed by {name(closure.by)} {when}: {shown(closure.reason)}"


def why_drained(drain: Drain, node_id: str) -> str:
    """Describe why a drained node leaves."""
    by = "" if drain.by == node_id else f" by {display_name(drain.by)}"
    return f"drained{by}: {shown(drain.reason, _REASON_SHOWN)}"


GONE = "all its nodes died or left, and none of them closed it"

# --- the waits of a node --------------------------------------------------------------------------


def world_text(world: Seat, before: Seat | None, waited_s: float, reason: str = "") -> str:
    """Describe the world that ended a wait; ``before`` is the node's seat in the world before, and
    ``reason`` why that is over."""
    why = f"; {reason}" if reason else ""
    was = "" if before is None else f" (was {before.rank} of {before.size}{why})"
    return (
        f"round {world.round} formed in {waited_s:.2f} s: node rank {world.rank} of "
        f"{world.size}{was}, master {world.master_address}:{world.master_port}, epoch {world.epoch}"
    )


def is_news(world: Seat, before: Seat | None, reason: str) -> bool:
    """Whether a world is another one than a restart of this node's own workers leads to."""
    return before is not None and (
        bool(reason) or (world.rank, world.size) != (before.rank, before.size)
    )


def wanted(settings: JobSettings) -> str:
    """Describe how many nodes a world may have."""
    unit = f" in units of {settings.unit}" if settings.unit > 1 else ""
    if settings.min_nodes == settings.max_nodes:
        return f"{settings.min_nodes}{unit}"
    return f"{settings.min_nodes} to {settings.max_nodes}{unit}"


def count_text(count: int, settings: JobSettings, here: str = "") -> str:
    """Describe a number of nodes, of those that a world may have."""
    if settings.min_nodes == settings.max_nodes:
        return f"{count} of {many(settings.max_nodes, 'node')}{here}"
    return f"{many(count, 'node')}{here} ({wanted(settings)} wanted)"


def seat_text(job_id: str, control: Control) -> str:
    """Describe what a spare waits for."""
    formed = control.formed
    if formed is None:
        return "for a seat"
    settings, size = formed.settings, formed.size
    head = f"for a seat: job {job_id!r} runs with"
    if settings.has_segments:
        kind = f"whole segments of domains, segment_size={settings.segment_text}"
        return f"{head} {count_text(size, settings)}; it takes {kind}"
    if size == settings.max_nodes:
        return f"{head} {many(size, 'node')}, its maximum; is another job using this id?"
    return f"{head} {count_text(size, settings)}; a world with this one would be no larger"


def round_text(
    control: Control,
    nodes: Nodes | None,
    count: int,
    settings: JobSettings,
    where: str = "",
    *,
    names: Names | None = None,
    census: Census | None = None,
) -> str:
    """Describe what the next round waits for.

    ``nodes`` are all presences; ``None`` if there are too many to look at, ``count`` of them.
    ``settings`` are the job's. ``where`` is where this node looks for others: a node that has not
    joined yet may be looking elsewhere.
    """
    stuck = no_successor(control)
    if stuck:
        return f"round {control.next_number}: {stuck}"
    here: list[str] = []
    parts: list[str] = []
    if names is None:  # a leader decides at each of thousands of arrivals
        names = names_in(control, nodes, looked_at=LOOKED_AT)
    named = ""
    if nodes is not None:
        census = take_census(control, nodes, settings) if census is None else census
        here = [presence.info.node_id for presence in census.pool]
        count = len(here)
        named = f": {names.all(here)}" if here else ""
        parts = _missing_text(control, nodes, settings, census, names)
        if not parts and count >= settings.min_nodes and census.pool:
            most = largest_world(census.candidates(nodes), settings, control.formed)
            parts = ["more may join until the last call is over"]
            if most < settings.min_nodes:
                parts = [f"the largest world that they could form has {many(most, 'node')}"]
    head = f"round {control.next_number}: {count_text(count, settings, ' here')}{named}"
    parts += _where_others_are(control, settings, names, count, where)
    return "; ".join((head, *parts))


def no_successor(control: Control) -> str:
    """Describe why no round can follow the last: all wait until its record is gone. Empty if one
    can."""
    number = control.next_number - 1
    if number < MAX_ROUND:
        return ""
    return f"no round can follow that of number {number}, which no node wrote: delete ctl/round"


def arrived_text(
    control: Control, nodes: Nodes, settings: JobSettings
) -> tuple[tuple[str, ...], str]:
    """Return the nodes that have arrived for the next round, when a node gives that up; and a text
    that also names those that have not.

    A node that is there has not arrived if it still works in the round before. ``control``
    names its members; ``settings`` are the job's.
    """
    census = take_census(control, nodes, settings)
    names = names_in(control, nodes)
    arrived = tuple(sorted(presence.info.node_id for presence in census.pool))
    parts = [
        f"{len(arrived)} of at least {many(settings.min_nodes, 'node')} arrived "
        f"({names.all(arrived) or 'none'})"
    ]
    parts += filter(None, [no_successor(control)])
    return arrived, "; ".join((*parts, *_missing_text(control, nodes, settings, census, names)))


def _missing_text(
    control: Control, nodes: Nodes, settings: JobSettings, census: Census, names: Names
) -> list[str]:
    """Name the nodes that the next round waits for, or does without, and why."""
    lost_, left_ = lost_and_left(missing(control, nodes, census))
    left_ |= census.leaving

    def late(node_id: str) -> str:
        return f"{names(node_id)} ({shown(nodes.present[node_id].info.address)})"

    parts = [f"not back yet: {', '.join(first(census.expected, late))}"] if census.expected else []
    if lost_ or left_:
        parts.append(change_text(names, lost_, left_))
    if census.strangers:
        strangers = [presence.info.node_id for presence in census.strangers]
        parts.append(f"not counting {names.all(strangers)}, started with other settings")
    if census.finished:
        verb = "has" if len(census.finished) == 1 else "have"
        parts.append(f"{names.all(census.finished)} {verb} finished and will not rejoin")
    lacking = incomplete(census.candidates(nodes), settings, control.formed)
    return parts + list(filter(None, [incomplete_text(lacking)]))


def incomplete_text(lacking: Mapping[str, tuple[int, int]]) -> str:
    """Describe the domains that wait for nodes, to make a segment whole."""
    named = [segment_text(domain, *counts) for domain, counts in islice(lacking.items(), _NAMED)]
    more = len(lacking) - len(named)
    return "; ".join(named) + (f"; and {many(more, 'other domain')}" if more else "")


def segment_text(domain: str, count: int, needed: int) -> str:
    if count > needed:
        return f"{shown(domain)}: {many(count, 'node')}, more than the largest world, of {needed}"
    more = "one" if needed - count == 1 else needed - count
    return f"{shown(domain)}: {count} of {needed}, waits for {more} more"


def _where_others_are(
    control: Control, settings: JobSettings, names: Names, count: int, where: str
) -> list[str]:
    refused = refused_lately(control, settings)
    if refused is not None:
        return [f"{refused_text(refused, names)}; {refused_help(refused)}"] if where else []
    if control.formed is not None or count >= settings.min_nodes or not where:
        return []
    return [f"are the others started, with the same --rdzv-id, etcd and prefix ({where})?"]


def refused_lately(control: Control, settings: JobSettings | None) -> Refused | None:
    """Return the node that could not join lately; ``settings`` are the job's, if they are known.

    A node whose settings kept it out of an earlier run may have those of this one.
    """
    refused = control.refused
    if refused is None or refused.how:
        return refused
    return None if settings is None or refused.settings == settings else refused


def refused_text(refused: Refused, name: Namer, when: str = "") -> str:
    """Describe which node cannot join, and why."""
    verb = f"could not join ({when})" if when else "cannot join"
    return f"{name(refused.node_id)} {verb}: {shown(refused.why, _WHY_SHOWN)}"


def refused_help(refused: Refused) -> str:
    """Describe what to do about it."""
    if refused.how:
        return "fix what its gate checks, or keep that host out of the job"
    return "start all nodes with the same --nnodes, node_unit and segment_size"


# --- why a round was closed -----------------------------------------------------------------------

ALL_SEATS = "all seats are taken"
ALL_BACK = "all surviving members rejoined"
NOT_BACK = "some members did not rejoin in time"
LAST_CALL = "the last call is over"
GIVES_UP = "the leader's join timeout is about to end"
