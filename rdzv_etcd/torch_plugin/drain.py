"""How the node of an agent that is drained leaves, and when its workers stop for that.

torch's agent knows no commit point: it can stop its workers, and does so when it is told that nodes
wait. The other agents have to stop theirs first: workers whose peers are gone fail, and an agent
counts that against ``--max-restarts``, but not what it was told of before.
"""

from __future__ import annotations

import threading
import time

from rdzv_etcd.world.group import Group

OTHERS_FIRST_S = 1.0
"""After so long the drained node stops its workers: the other agents look ten times a second
whether nodes wait, and have been told by then."""


class Departure:
    """How one agent's node leaves when it is drained."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._left_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the node has left, or is about to, because it was drained."""
        return self._left_s is not None

    def is_due(self) -> bool:
        """Whether the workers have to stop; the node leaves when this is first asked after it was
        drained. From memory, does not block."""
        if self._left_s is None:
            reason = self._group.drain_reason
            if reason is None:
                return False
            self._left_s = time.monotonic()
            threading.Thread(
                target=self._group.leave, args=(reason,), name="rdzv-etcd drain"
            ).start()
        return time.monotonic() >= self._left_s + OTHERS_FIRST_S
