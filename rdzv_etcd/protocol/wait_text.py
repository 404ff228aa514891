"""Says what a waiting node waits for and for whom, what came of it, and when to say so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv_etcd.names import display_name, display_names, is_unknown, names_apart
from rdzv_etcd.protocol.census import Census, take_census
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Control, Nodes, Presence, Refused
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_ROUND
from rdzv_etcd.text import shown

_NAMED = 8
"""How many missing nodes a line names."""
_WHY_SHOWN = 400
_FIRST_S = (10.0, 30.0, 60.0)
_THEN_EVERY_S = 300.0


class LineTimes:
    """When the lines about one wait are due: soon, and then ever more rarely."""

    def __init__(self) -> None:
        self._told = 0

    @property
    def any_told(self) -> bool:
        return self._told > 0

    @property
    def next_s(self) -> float:
        """How long after the beginning of the wait the next one is due."""
        more = self._told - len(_FIRST_S)
        return _FIRST_S[self._told] if more < 0 else _FIRST_S[-1] + _THEN_EVERY_S * (more + 1)

    def is_due(self, waited_s: float) -> bool:
        """Whether one is to be told now; then it counts as told."""
        if waited_s < self.next_s:
            return False
        self.note(waited_s)
        return True

    def note(self, waited_s: float) -> None:
        """Note that one was told. If the node was stopped for a while, it stands for several."""
        self._told += 1
        while self.next_s <= waited_s:
            self._told += 1


def tell_world(world: Seat, before: Seat | None, waited_s: float, reason: str = "") -> str:
    """What came of a wait; ``before`` is the node's place in the world before, ``reason`` why that
    is over."""
    why = f"; {reason}" if reason else ""
    was = "" if before is None else f" (was {before.rank} of {before.size}{why})"
    return (
        f"round {world.round}: rank {world.rank} of {world.size}{was} after {waited_s:.2f} s, "
        f"master {world.master_address}:{world.master_port}, epoch {world.epoch}"
    )


def is_news(world: Seat, before: Seat | None, reason: str) -> bool:
    """Whether a world is another one than a restart of this node's own workers leads to."""
    return before is not None and (
        bool(reason) or (world.rank, world.size) != (before.rank, before.size)
    )


def tell_seat(job_id: str, control: Control) -> str:
    """What a spare waits for."""
    formed = control.formed
    if formed is None:
        return "for a seat"
    settings, size = formed.settings, formed.size
    head = f"for a seat: job {job_id!r} runs with"
    if size == settings.max_nodes:
        return f"{head} all {size} of {needed(settings)} nodes; is another job using this id?"
    return f"{head} {size} of {needed(settings)} nodes; a world with this one would be no larger"


def tell_round(
    control: Control, nodes: Nodes | None, count: int, settings: JobSettings, where: str = ""
) -> str:
    """What a node waits for until the next round is formed.

    ``nodes`` are all presences; ``None`` if there are too many to look at, ``count`` of them.
    ``settings`` are the job's. ``where`` is it that a node looks for others: whoever has not come
    yet may be looking elsewhere.
    """
    head = f"for round {control.next_number}"
    stuck = no_successor(control)
    if stuck:
        return f"{head}: {stuck}"
    if nodes is None:
        parts = [f"{head}: {count} of {needed(settings)} nodes are there"]
        parts += _where_others_are(control, settings, (), count, where)
        return "; ".join(parts)
    census = take_census(control, nodes, settings)
    here = [presence.info.node_id for presence in census.pool]
    named = f" ({display_names(here)})" if here else ""
    parts = [f"{head}: {len(here)} of {needed(settings)} nodes{named}"]
    parts += _missing(control, nodes, census)
    parts += _not_counted(census)
    if len(parts) == 1 and len(here) >= settings.min_nodes:
        parts.append("more may come until the last call is over")
    parts += _where_others_are(control, settings, here, len(here), where)
    return "; ".join(parts)


def no_successor(control: Control) -> str:
    """Say so if no round can follow the one there is: then all wait until its record is gone."""
    number = control.next_number - 1
    if number < MAX_ROUND:
        return ""
    return f"no round can follow that of number {number}, which no node wrote: delete ctl/round"


def tell_arrived(
    control: Control, nodes: Nodes, settings: JobSettings
) -> tuple[tuple[str, ...], str]:
    """Who has arrived for the next round, when a node gives it up; and the same in words, with who
    has not.

    A node that is there has not arrived if it is still at work in the round before. ``control``
    names its members; ``settings`` are the job's.
    """
    census = take_census(control, nodes, settings)
    arrived = tuple(sorted(presence.info.node_id for presence in census.pool))
    named = display_names(arrived) or "none"
    parts = [f"{len(arrived)} of at least {settings.min_nodes} nodes arrived ({named})"]
    parts += filter(None, [no_successor(control)])
    parts += _missing(control, nodes, census)
    parts += _not_counted(census)
    return arrived, "; ".join(parts)


def _not_counted(census: Census) -> list[str]:
    parts = finished_text(census)
    if census.strangers:
        strangers = [presence.info.node_id for presence in census.strangers]
        parts.append(f"not counting {display_names(strangers)}, started with other settings")
    return parts


def finished_text(census: Census) -> list[str]:
    """Name the nodes that have finished, if there are any: the next round does without them."""
    if not census.finished:
        return []
    verb = "has" if len(census.finished) == 1 else "have"
    return [f"{display_names(census.finished)} {verb} finished and will not rejoin"]


def _where_others_are(
    control: Control, settings: JobSettings, here: Sequence[str], count: int, where: str
) -> list[str]:
    refused = refused_lately(control, settings)
    if refused is not None:
        return [f"{refused_text(refused, here)}; {refused_help(refused)}"]
    if control.formed is not None or count >= settings.min_nodes or not where:
        return []
    return [f"are the others started, with the same --rdzv-id, etcd and prefix ({where})?"]


def refused_lately(control: Control, settings: JobSettings | None) -> Refused | None:
    """Return the node that could not join lately; ``settings`` are the job's, if they are known.

    What other settings kept out of an earlier run may have those of this one.
    """
    refused = control.refused
    if refused is None or refused.how:
        return refused
    return None if settings is None or refused.settings == settings else refused


def refused_text(refused: Refused, here: Iterable[str], when: str = "") -> str:
    """Say which node cannot join, and why; ``here`` are others, perhaps of its host."""
    verb = f"could not join ({when})" if when else "cannot join"
    return f"{names_apart(refused.node_id, *here)[0]} {verb}: {shown(refused.why, _WHY_SHOWN)}"


def refused_help(refused: Refused) -> str:
    """What to do about it."""
    if refused.how:
        return "fix what its gate checks, or keep that host out of the job"
    return "start all nodes with the same --nnodes and node_unit"


def needed(settings: JobSettings) -> str:
    """How many nodes a world may have, as people say it."""
    if settings.min_nodes == settings.max_nodes:
        return str(settings.min_nodes)
    unit = f" (in units of {settings.node_unit})" if settings.node_unit > 1 else ""
    return f"{settings.min_nodes} to {settings.max_nodes}{unit}"


def _missing(control: Control, nodes: Nodes, census: Census) -> list[str]:
    formed = control.formed
    if formed is None:
        return []
    change = control.open_change
    how = {node_id: nodes.how_absent(node_id) for node_id in nodes.accused}
    how |= {} if change is None else change.lost
    missing = [
        *(_with_address(nodes.present[node_id]) for node_id in census.expected),
        *(
            f"{display_name(node_id)} ({shown(how.get(node_id, 'gone'))})"
            for node_id in (*census.absent, *census.leaving)
            if not is_unknown(node_id)
        ),
    ]
    if not missing:
        return []
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return [f"missing since round {formed.number}: {', '.join(missing[:_NAMED])}{more}"]


def _with_address(presence: Presence) -> str:
    return f"{display_name(presence.info.node_id)} ({shown(presence.info.address)}, not back yet)"
