"""The simulated network between one connection and the server, and the faults on it.

Knows messages, delays and losses; knows nothing of what the messages mean. All methods must be
called on the event loop's thread, and do not block.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.testing.model import Model, Request, Response

Match = Callable[[Request], bool]
WatchMatch = Callable[[bytes, "bytes | None"], bool]
"""Selects watches by key and range end."""


class Delivery(Enum):
    """The fate of one call."""

    NORMAL = "normal"
    REQUEST_LOST = "request lost"
    REPLY_LOST = "reply lost"


@dataclass(slots=True)
class Planned:
    """A fault for the next ``count`` matching calls."""

    count: int
    matching: Match
    fate: Delivery = Delivery.NORMAL
    delay_s: float = 0.0
    stall_s: float = 0.0
    again_s: float | None = None
    error: EtcdError | None = None


_NO_FAULT = Planned(0, lambda _request: True)


class Link:
    """Delays, drops and cuts what passes between one connection and the server.

    Draws come from the server's seeded random generator, so one seed gives one behaviour.
    """

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._delay_s = (0.0, 0.0)
        self._planned: list[Planned] = []
        self._loss = (0.0, 0.0)
        self._change: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[], None]] = []
        self.watch_lag_s = 0.0
        """How far watches are behind; see :meth:`lag_watches`."""
        self.cut = False
        """Whether the link is partitioned."""
        self.silent = False
        """Whether the client does not notice the cut (packets vanish; no reset, no refusal)."""
        self.refusal: Callable[[], EtcdError] | None = None
        """Makes the error with which everything but keep-alives is refused; see :meth:`refuse`."""
        self.cuts = 0
        """How often a connection over this link was broken."""
        self.moves = 0
        """How often the client moved to another connection, perhaps to another member of etcd:
        calls under way stay on the old one, watches do not."""
        self._stalled: tuple[tuple[int, int], WatchMatch] | None = None
        self._hung: tuple[int, int] | None = None
        """The connection on which matching watches (stalled) or all (hung) are not served."""

    # -- faults -----------------------------------------------------------------------------------

    def delay(self, low_s: float, high_s: float | None = None) -> None:
        """Delay every message, each way, by a random time in the range.

        Replies and requests of concurrent calls may overtake each other; a watch's do not.
        """
        self._delay_s = (low_s, low_s if high_s is None else high_s)

    def lag_watches(self, delay_s: float) -> None:
        """Deliver every change this much later to watches than to reads; 0 ends it.

        As when they are served by a member of etcd that is behind, or by one that is busy.
        """
        self.watch_lag_s = delay_s

    def stall_watches(self, matching: WatchMatch) -> None:
        """Silence matching watches, new ones included, for as long as this connection lasts.

        Everything else continues. As when a proxy stalls a stream, or etcd forgets a watch.
        """
        self._stalled = (self.connection, matching)

    def hang(self) -> None:
        """Stop the member of etcd that the client is connected to from applying anything.

        As when its disk hangs: it still forwards writes and keep-alives, but answers only the
        latter, and its watches are silent. It ends when the client moves to another member.
        """
        self._hung = self.connection

    def lose(self, requests: float = 0.0, replies: float = 0.0) -> None:
        """Lose each request and each reply with these probabilities.

        A client cannot distinguish the two, so a write that must not be repeated ends with
        :class:`~rdzv_etcd.errors.OutcomeUnknownError`; everything else is tried again.
        """
        self._loss = (requests, replies)

    def drop_requests(self, count: int = 1, matching: Match | None = None) -> None:
        """Let the next calls fail with :class:`~rdzv_etcd.errors.EtcdUnavailableError`.

        At their deadline: nothing reached a server, and the client knows it.
        """
        self._plan(Planned(count, matching or _any, Delivery.REQUEST_LOST))

    def drop_replies(self, count: int = 1, matching: Match | None = None) -> None:
        """Apply the next calls, but lose the reply and the connection with it.

        A write that must not be repeated raises :class:`~rdzv_etcd.errors.OutcomeUnknownError`;
        any other call is tried again: a repeatable write is then applied twice.
        """
        self._plan(Planned(count, matching or _any, Delivery.REPLY_LOST))

    def hold_requests(self, delay_s: float, count: int = 1, matching: Match | None = None) -> None:
        """Let the next requests arrive late: perhaps after their caller has given up."""
        self._plan(Planned(count, matching or _any, delay_s=delay_s))

    def stall_requests(self, delay_s: float, count: int = 1, matching: Match | None = None) -> None:
        """Let the next requests be sent late, over whatever connection there is by then.

        As if their process had been stopped between its decision and its sending: unlike a request
        that is under way, it outlives a broken connection, even a wiped etcd.
        """
        self._plan(Planned(count, matching or _any, stall_s=delay_s))

    def repeat_requests(
        self, delay_s: float, count: int = 1, matching: Match | None = None
    ) -> None:
        """Apply the next calls that may be repeated once more, ``delay_s`` later.

        A client sends such a call again over another connection when no reply comes; the first copy
        may lie in a member of etcd that was paused, and be applied long after the second one.
        """
        self._plan(Planned(count, matching or _any, again_s=delay_s))

    def fail(self, error: EtcdError, count: int = 1, matching: Match | None = None) -> None:
        """Answer the next calls with ``error`` and do nothing."""
        self._plan(Planned(count, matching or _any, error=error))

    def refuse(self, why: Callable[[], EtcdError] | None) -> None:
        """Refuse every request and every new watch with ``why()``; ``None`` ends it.

        As etcd does when a user lost a role, or a password was changed: open watches continue, and
        so do keep-alives, which old versions (3.5.1) do not check. To refuse some requests only,
        see :attr:`MemoryEtcd.forbidden`.
        """
        self.refusal = why

    def partition(self, *, silent: bool = False) -> None:
        """Let nothing pass until :meth:`heal`; what is under way is lost.

        Calls hang until their deadline, watches stall. ``silent``: the client does not notice (a
        black hole), so that writes end with an unknown outcome; otherwise the connection is
        reset, and writes begun later are known not to have reached a server.
        """
        self.cut, self.silent = True, silent
        if not silent:
            self.cuts += 1
        self.changed()

    def heal(self) -> None:
        """End a partition; watches resume where they were."""
        if self.cut:
            self.cuts += 1
        self.cut = self.silent = False
        self.changed()

    def _plan(self, fault: Planned) -> None:
        self._planned.append(fault)

    # -- for connections --------------------------------------------------------------------------

    @property
    def connection(self) -> tuple[int, int]:
        """Identifies the present connection over this link."""
        return self.cuts, self.moves

    @property
    def hangs(self) -> bool:
        return self._hung == self.connection

    def stalls(self, key: bytes, range_end: bytes | None) -> bool:
        """Whether such a watch is silent."""
        if self._stalled is None or self._stalled[0] != self.connection:
            return self.hangs
        return self.hangs or self._stalled[1](key, range_end)

    def move(self) -> None:
        """The client gives the connection up."""
        self.moves += 1
        self.changed()

    def draw_delay_s(self) -> float:
        low, high = self._delay_s
        return low if low == high else self._random.uniform(low, high)

    def request_lost(self) -> bool:
        return self._loss[0] > 0 and self._random.random() < self._loss[0]

    def reply_lost(self) -> bool:
        return self._loss[1] > 0 and self._random.random() < self._loss[1]

    def next_fault(self, request: Request) -> Planned:
        """Take the first planned fault that fits the request."""
        for fault in self._planned:
            if fault.matching(request):
                fault.count -= 1
                if fault.count <= 0:
                    self._planned.remove(fault)
                return fault
        return _NO_FAULT

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the link or the server goes down or comes back."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def change(self) -> asyncio.Future[None]:
        """Return a future, shared by all waiters, that is done at the next change."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def changed(self) -> None:
        """Notify all waiters and listeners that the link or the server went down or came back."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
        for listener in list(self._listeners):
            listener()


def _any(_request: Request) -> bool:
    return True


class Server(Protocol):
    """What connections and watches use of :class:`~rdzv_etcd.testing.MemoryEtcd`."""

    clock: Clock
    model: Model
    up: bool
    overloaded: bool
    connections: list[Any]

    @property
    def revision(self) -> int: ...

    def check_permission(self, request: Request) -> None: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.Handle: ...

    def apply(self, request: Request, source: str = "") -> Response: ...


class Client(Protocol):
    """What watches use of their connection."""

    link: Link

    @property
    def passing(self) -> bool: ...

    def forget(self, watch: Any) -> None: ...
