"""A named leadership as its member uses it. Blocking."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import Any

from rdzv_etcd.arguments import Bytes, as_bytes, seconds_or_none
from rdzv_etcd.core.elections import Fence
from rdzv_etcd.errors import LeadershipLostError, MisuseError, RendezvousFailedError
from rdzv_etcd.group.elections import Term
from rdzv_etcd.group.participation import Participation
from rdzv_etcd.group.round_store import TIMEOUT_S, RoundStore
from rdzv_etcd.uncopied import Uncopied


class Leadership(Uncopied):
    """A leadership that this member came to; made by :meth:`rdzv_etcd.World.elect`.

    ::

        with world.elect("uploader", timeout_s=60) as leadership:
            while leadership.is_held and work_to_do():
                upload(part(), fence=leadership.fence)

    It ends with :meth:`resign`, the end of the ``with`` block, the world, and this node's session
    in etcd: a member that was cut off and comes back does not lead again unless it is elected
    again. One that nobody refers to is resigned. Its methods may be called from any thread.
    """

    _instead = "hand over its fence, a plain value"

    def __init__(self, name: str, part: Participation, store: RoundStore, term: Term) -> None:
        self._name = name
        self._part = part
        self._store = store
        self._term = term
        self._finalizer = weakref.finalize(self, _drop, part, term)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<Leadership {self._name!r} fence={tuple(self.fence)} is_held={self.is_held}>"

    @property
    def name(self) -> str:
        """What this member leads in."""
        return self._name

    @property
    def fence(self) -> Fence:
        """``(epoch, term)``: two whole numbers that compare as a tuple, and grow from leader to
        leader of this name over all worlds of the job. Store it with what the leader writes
        elsewhere, and refuse to overwrite what has a higher one.

        The epoch is the world's and grows even if etcd loses its data. The term grows in one world
        with etcd's revision; if etcd is restored from a snapshot of this very world, it goes on
        above every term of those who have led, as soon as etcd has heard of them again. Until then
        a leader may have a lower one: what it writes is refused, and it is elected again.
        """
        return self._term.fence

    @property
    def is_held(self) -> bool:
        """Whether this member leads, for all it knows; from memory, in microseconds.

        ``False`` at once when the leadership, the world or this node's session is gone; in a forked
        child; and while nothing was heard from etcd for ``lease_ttl``, when others may lead for all
        this node knows.
        What is written elsewhere just after it was asked is guarded by :attr:`fence` only.
        """
        return not self._part.is_over and self._term.is_held

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until this member leads no longer; ``False`` after ``timeout_s`` seconds.

        ``timeout_s=None``: no limit. Not told is what :attr:`is_held` only suspects.
        """
        limit_s = seconds_or_none(timeout_s)
        if not self._is_over:
            try:
                self._part.run(self._lost(limit_s))
            except MisuseError:
                raise
            except (TimeoutError, RendezvousFailedError):
                pass
        return self._is_over

    async def _lost(self, timeout_s: float | None) -> None:
        await self._term._node.context.clock.wait_for(self._term.lost(), timeout_s)

    @property
    def _is_over(self) -> bool:
        return self._part.is_over or self._term.is_over

    def set(self, key: str, value: Bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Set a value in the world's store if this member still leads, which etcd itself looks at
        in the same transaction.

        Raises :class:`~rdzv_etcd.errors.LeadershipLostError` if it does not, and then nothing was
        written; otherwise as ``world.store.set``.
        """
        self._part.run(self._set(key, value, timeout_s))

    async def _set(self, key: str, value: Bytes, timeout_s: float | None) -> None:
        data = as_bytes("the value", value)
        set_while = partial(self._store._store.set_while, self._term.guard, key, data)
        limit_s = seconds_or_none(timeout_s)
        if self._term.has_ended or not await set_while(limit_s):
            self._term.end()
            raise LeadershipLostError(
                f"this member does not lead in {self._name!r} any more, so nothing was written: "
                "stop what only the leader does, and be elected again",
                fence=self.fence,
            )

    def resign(self) -> None:
        """Cease to lead; the next one that waits does. Idempotent, and never raises because etcd is
        away: then it is told later. Blocks for at most ``request_timeout``; if it is interrupted,
        it is resigned all the same."""
        work = self._resigned()
        if work is not None:
            try:
                self._part.run(work)
            except MisuseError:
                raise
            except RendezvousFailedError:  # this node leaves, and with it goes what it leads
                pass

    def _resigned(self) -> Coroutine[Any, Any, None] | None:
        """Resign, whatever becomes of the caller, and return the wait until etcd has been told;
        ``None`` if it was resigned before, or this node has left."""
        if not self._finalizer.alive or self._part.is_over:
            return None
        _drop(self._part, self._term)
        self._finalizer.detach()  # only now: until then it is what resigns if this is interrupted
        return self._term.told()

    def __enter__(self) -> Leadership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.resign()


def _drop(part: Participation, term: Term) -> None:
    part.begin(_end(term))


async def _end(term: Term) -> None:
    term.end()
