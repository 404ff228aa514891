"""Leadership among the members of a world, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from rdzv_etcd.arguments import Bytes, seconds_or_none
from rdzv_etcd.core.elections import Fence
from rdzv_etcd.errors import MisuseError, RendezvousFailedError
from rdzv_etcd.group import leaderships as blocking_leaderships
from rdzv_etcd.group.round_store import TIMEOUT_S
from rdzv_etcd.uncopied import Uncopied


class Leadership(Uncopied):
    """A leadership that this member came to, as :class:`rdzv_etcd.Leadership`."""

    _instead = blocking_leaderships.Leadership._instead

    def __init__(self, leadership: blocking_leaderships.Leadership) -> None:
        """Made by :meth:`World.elect`."""
        self._leadership = leadership

    def __repr__(self) -> str:
        return repr(self._leadership)

    @property
    def name(self) -> str:
        """What this member leads in."""
        return self._leadership.name

    @property
    def fence(self) -> Fence:
        """As :attr:`rdzv_etcd.Leadership.fence`."""
        return self._leadership.fence

    @property
    def is_held(self) -> bool:
        """As :attr:`rdzv_etcd.Leadership.is_held`: from memory."""
        return self._leadership.is_held

    async def wait_lost(self, timeout_s: float | None = None) -> bool:
        """As :meth:`rdzv_etcd.Leadership.wait_lost`."""
        limit_s = seconds_or_none(timeout_s)
        if not self._leadership._is_over:
            try:
                await self._leadership._part.call(self._leadership._lost(limit_s))
            except MisuseError:
                raise
            except (TimeoutError, asyncio.TimeoutError, RendezvousFailedError):
                pass
        return self._leadership._is_over

    async def set(self, key: str, value: Bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """As :meth:`rdzv_etcd.Leadership.set`."""
        await self._leadership._part.call(self._leadership._set(key, value, timeout_s))

    async def resign(self) -> None:
        """As :meth:`rdzv_etcd.Leadership.resign`. If this is cancelled, it is resigned all the
        same."""
        work = self._leadership._resigned()
        if work is not None:
            with contextlib.suppress(RendezvousFailedError):  # this node leaves
                await self._leadership._part.call(work)

    async def __aenter__(self) -> Leadership:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.resign()
