"""What kind of loss it was, and how long after the death it was declared. Pure.

Kinds are few and fixed, for who counts them; what was seen, in words, is in the change itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rdzv_etcd.protocol.model import Change, Loss, Nodes, reason_to_leave
from rdzv_etcd.protocol.world_end import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
)

_CAUSES = {
    Loss.EXPIRED.value: "lease_expired",
    "its process is gone": "process_gone",
    "its host is silent": "host_silent",
    "reported dead": "reported",
    "is wedged": "wedged",
}
"""By how they begin: see :mod:`rdzv_etcd.protocol.ring` and :mod:`rdzv_etcd.node.watchdog`."""

_ENDS: dict[type[WorldChange], str] = {
    Lost: "lost",
    Left: "left",
    Waiting: "waiting",
    Expelled: "expelled",
    Finished: "finished",
    Failed: "failed",
    MovedOn: "moved_on",
}


@dataclass(frozen=True, slots=True)
class MemberLoss:
    """One member that was declared lost."""

    node_id: str
    cause: str
    after_s: float | None
    """How many seconds after the end of its process; ``None`` if nobody has seen that."""


def losses(change: Change, nodes: Nodes, at_s: float) -> Iterator[MemberLoss]:
    """Tell the losses of a change that is published at ``at_s``, by the clock of ``nodes``.

    Who has left is not lost. A change names the first 32 only.
    """
    for node_id, how in change.lost.items():
        if reason_to_leave(how) is not None:
            continue
        accused = nodes.accused.get(node_id)
        after_s = None
        if accused is not None and accused.accusation.after_ms is not None:
            after_s = max(0.0, at_s - accused.seen_s) + accused.accusation.after_ms / 1000
        yield MemberLoss(node_id, cause_of_loss(how), after_s)


def cause_of_loss(how: str) -> str:
    """Name the kind of a loss; ``how`` is what a change says of it."""
    return next((cause for words, cause in _CAUSES.items() if how.startswith(words)), "other")


def cause_of_end(change: WorldChange) -> str:
    """Name the kind of a world's end."""
    return _ENDS[type(change)]
