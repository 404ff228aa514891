"""Says what a waiting node waits for, and for whom. Pure."""

from __future__ import annotations

from rdzv_etcd.core.census import Census, take_census
from rdzv_etcd.core.model import Control, Nodes, Presence, display_name, display_names
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.text import shown

_NAMED = 8
"""How many missing nodes a line names."""


def tell_seat(job_id: str, control: Control) -> str:
    """What a spare waits for."""
    formed = control.formed
    if formed is None:
        return "for a seat"
    settings = formed.settings
    all_of = "all " if formed.size == settings.max_nodes else ""
    return (
        f"for a seat: job {job_id!r} runs with {all_of}{formed.size} of {needed(settings)} nodes; "
        "is another job using this id?"
    )


def tell_round(control: Control, nodes: Nodes | None, count: int, settings: JobSettings) -> str:
    """What a node waits for until the next round is formed.

    ``nodes`` are all presences; ``None`` if there are too many to look at, ``count`` of them.
    ``settings`` are the job's.
    """
    head = f"for round {control.next_number}"
    if nodes is None:
        return f"{head}: {count} of {needed(settings)} nodes are there"
    census = take_census(control, nodes, settings)
    here = [presence.info.node_id for presence in census.pool]
    named = f" ({display_names(here)})" if here else ""
    parts = [f"{head}: {len(here)} of {needed(settings)} nodes{named}"]
    parts += _missing(control, nodes, census)
    if census.strangers:
        strangers = [presence.info.node_id for presence in census.strangers]
        parts.append(f"not counting {display_names(strangers)}, started with other settings")
    if len(parts) == 1 and len(here) >= settings.min_nodes:
        parts.append("more may come until the last call is over")
    return "; ".join(parts)


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
        ),
    ]
    if not missing:
        return []
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return [f"missing since round {formed.number}: {', '.join(missing[:_NAMED])}{more}"]


def _with_address(presence: Presence) -> str:
    return f"{display_name(presence.info.node_id)} ({shown(presence.info.address)}, not back yet)"
