"""Reports keys among the presences that no node of this job wrote. Reads nothing itself."""

from __future__ import annotations

from rdzv_etcd.node.status_log import StatusLog
from rdzv_etcd.protocol.model import Nodes

_TOLD = 8
"""More than this are one mistake, or one attack: they are only counted."""


class Strangers:
    """Remembers what was reported, so that each is reported once."""

    def __init__(self, status_log: StatusLog) -> None:
        self._log = status_log
        self._known: dict[str, int] = {}
        self._told = 0

    def look_at(self, nodes: Nodes) -> None:
        """Warn of what is new among the unreadable keys."""
        known = {node_id: it.mod_revision for node_id, it in nodes.unreadable.items()}
        if known == self._known:
            return
        new = [it for node_id, it in nodes.unreadable.items() if node_id not in self._known]
        self._known = known
        for stranger in new[: max(0, _TOLD - self._told)]:
            self._log.warn(f"not counted among the nodes: {stranger.problem}")
        if self._told < _TOLD < self._told + len(new):
            self._log.warn(
                f"there are {len(known)} keys among the nodes that this library did not write; no "
                "more of them are reported"
            )
        self._told += len(new)
