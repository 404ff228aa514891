"""How nodes are named to people, and what stands in for one whose name is not known."""

from __future__ import annotations

from collections.abc import Sequence

from rdzv_etcd.text import shown

_NOBODY = "nobody~"
_SHOWN_NAME = 100


def unknown_member(rank: int) -> str:
    """Stand in for a member whose slice is not there: a name that no node has."""
    return f"{_NOBODY}{rank}"


def is_unknown(node_id: str) -> bool:
    return node_id.startswith(_NOBODY) and node_id.removeprefix(_NOBODY).isdecimal()


def display_name(node_id: str) -> str:
    """The part of a node id that people know: its host name."""
    return shown(node_id.split("~", 1)[0], _SHOWN_NAME)


def names_apart(*node_ids: str) -> list[str]:
    """Their host names; where those are ambiguous with the pid, or the whole ids."""
    for parts in (1, 2, 3):
        names = ["~".join(node_id.split("~")[:parts]) for node_id in node_ids]
        if len(set(names)) == len(names):
            break
    return [shown(name, _SHOWN_NAME) for name in names]


def display_names(node_ids: Sequence[str]) -> str:
    """Host names for a log line; where they are ambiguous with the pid, or the whole id."""
    limit = 8
    more = f" and {len(node_ids) - limit} more" if len(node_ids) > limit else ""
    return ", ".join(names_apart(*node_ids[:limit])) + more
