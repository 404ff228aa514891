"""The names of nodes for people, and stand-ins for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv_etcd.text import shown

_NOBODY = "nobody~"
_SHOWN_NAME = 100
_NAMED = 8
_REMEMBERED = 50_000
LOOKED_AT = 64
"""How many nodes of a kind are looked at for two of one host where there may be thousands."""


def unknown_member(rank: int) -> str:
    """Stand in for a member whose slice is not there: a name that no node has."""
    return f"{_NOBODY}{rank}"


def is_unknown(node_id: str) -> bool:
    return node_id.startswith(_NOBODY) and node_id.removeprefix(_NOBODY).isdecimal()


def display_name(node_id: str) -> str:
    """The part of a node id that people know: its host name."""
    return shown(node_id.split("~", 1)[0], _SHOWN_NAME)


class Names:
    """Names nodes by their hosts; by host and pid (``vm~9200``) once two known ids share a host,
    and by their whole ids once two share that as well. Ids of nodes that are gone count."""

    def __init__(self, node_ids: Iterable[str] = (), *, with_pids: bool = False) -> None:
        """``with_pids``: from the beginning."""
        self._parts = 2 if with_pids else 1
        self._ids: dict[str, str] = {}
        """A known node of each name."""
        self.learn(node_ids)

    def learn(self, node_ids: Iterable[str]) -> None:
        """Note ids that are known from now on."""
        for node_id in node_ids:
            if len(self._ids) > _REMEMBERED:
                self._ids.clear()
            while self._ids.setdefault(self._cut(node_id), node_id) != node_id and self._parts < 3:
                self._parts += 1
                self._ids = {self._cut(known): known for known in self._ids.values()}

    def __call__(self, node_id: str) -> str:
        self.learn((node_id,))
        return shown(self._cut(node_id), _SHOWN_NAME)

    def all(self, node_ids: Sequence[str], most: int = _NAMED) -> str:
        """Name the first of them, and count the others."""
        self.learn(node_ids[:most])
        more = f" and {len(node_ids) - most} more" if len(node_ids) > most else ""
        return ", ".join(map(self, node_ids[:most])) + more

    def _cut(self, node_id: str) -> str:
        return "~".join(node_id.split("~", 3)[: self._parts])


def display_names(node_ids: Sequence[str]) -> str:
    """Name nodes of which nothing else is known."""
    return Names().all(node_ids)
