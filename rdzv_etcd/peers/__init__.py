"""Links between the nodes of a job, over which a death is noticed long before a lease runs out.

A node *watches* another one over a link that it opens; the other one *answers* for itself. Only a
connection that names the job and the node gets an answer, and no connection gets more than that.
This is the port; :mod:`rdzv_etcd.peers.tcp` carries it. Knows nothing of etcd, rounds or leases.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Peer:
    """The node at one end of a link."""

    job: str
    node_id: str
    """Names the process, not only the host."""


class LinkEnd(Enum):
    """How a link ended."""

    GOODBYE = "it said goodbye"
    CLOSED = "the connection was closed"
    SILENT = "nothing was heard from it"


class Answer(Enum):
    """The outcome of an attempt to reach a node."""

    SAME = "it answers"
    OTHER = "another node answers there"
    REFUSED = "its host refuses the connection"
    MUTE = "accepted and closed without an answer"
    HELD = "accepted without an answer"
    """Its kernel holds the connection: the process exists, but is stopped, or very slow."""
    UNREACHABLE = "not reached"


class PeerLink(Protocol):
    """An open link to the node that is watched."""

    async def ended(self) -> LinkEnd:
        """Wait until the link has ended, and return how."""

    def close(self) -> None:
        """End the link; idempotent, does not block."""


@dataclass(frozen=True, slots=True)
class Contact:
    """The outcome of an attempt, and the link if the node itself answered."""

    answer: Answer
    detail: str = ""
    link: PeerLink | None = None

    @property
    def why(self) -> str:
        """The outcome in words."""
        return self.detail or self.answer.value

    @property
    def says_gone(self) -> bool:
        """Whether the answer would be impossible if that node were alive."""
        return self.answer in (Answer.REFUSED, Answer.OTHER)

    @property
    def is_clear(self) -> bool:
        """Whether the answer shows that the node is alive, or that it is gone."""
        return self.link is not None or self.says_gone


class PeerNetwork(Protocol):
    """One node's end of all its links. All methods run on the library's event loop."""

    @property
    def port(self) -> int:
        """Where others reach this node; 0: nowhere."""

    async def admit(self, me: Peer) -> None:
        """Begin to answer for this node. Earlier connections wait until then. Idempotent."""

    async def connect(self, address: str, port: int, peer: Peer, timeout_s: float) -> Contact:
        """Try to reach exactly that node, for at most ``timeout_s``; raises nothing."""

    async def close(self) -> None:
        """Say goodbye to the nodes that watch this one, and close everything. Idempotent."""
