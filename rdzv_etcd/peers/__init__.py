"""What the rest of the library asks of links between nodes.

A node *watches* another one over a link that it opens; the other one *answers* for itself. Only who
says for which job and for which node it comes gets an answer, and nobody gets more than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at one end of a link."""

    job: str
    node_id: str
    """Names the process, not only the host."""


class End(Enum):
    """How a link ended."""

    GOOD_BYE = "it said good-bye"
    CLOSED = "the connection was closed"
    SILENT = "nothing was heard from it"


class Answer(Enum):
    """What came of the attempt to reach a node."""

    SAME = "it answers"
    OTHER = "another node answers there"
    REFUSED = "its host refuses the connection"
    MUTE = "accepted and closed without an answer"
    HELD = "accepted without an answer"
    """A kernel holds the connection: a process is there, but stopped, or very slow."""
    UNREACHABLE = "not reached"


class Link(Protocol):
    """An open link to the node that is watched."""

    async def ended(self) -> End:
        """Wait until the link has ended, and return how."""

    def close(self) -> None:
        """End the link; idempotent, does not block."""


@dataclass(frozen=True, slots=True)
class Contact:
    """What came of an attempt, and the link if the node itself answered."""

    answer: Answer
    why: str = ""
    """For people."""
    link: Link | None = None

    @property
    def says_gone(self) -> bool:
        """Whether somebody has answered who would not if that node lived."""
        return self.answer in (Answer.REFUSED, Answer.OTHER)

    @property
    def is_clear(self) -> bool:
        """Whether that node has answered, or somebody who says that it is gone."""
        return self.link is not None or self.says_gone


class PeerNetwork(Protocol):
    """One node's end of all its links. All methods run on the library's event loop."""

    @property
    def port(self) -> int:
        """Where others reach this node; 0: nowhere."""

    async def admit(self, me: Peer) -> None:
        """Begin to answer for this node, also after :meth:`disown`. Who has come before waits.
        Idempotent."""

    def disown(self) -> None:
        """Answer for this node no more, and end the links over which it is watched, without a
        good-bye: until :meth:`admit`."""

    async def connect(self, address: str, port: int, peer: Peer, timeout_s: float) -> Contact:
        """Try to reach that very node, for at most ``timeout_s``; raises nothing."""

    async def close(self) -> None:
        """Say good-bye to who watches this node, and close everything. Idempotent."""
