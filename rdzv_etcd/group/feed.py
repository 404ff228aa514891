"""Keeps a view of a key range up to date: one read, then a watch from its revision.

Knows etcd's port; what the keys mean is in the two functions it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError, EtcdUnavailableError, RdzvEtcdError, WatchLostError
from rdzv_etcd.etcd.api import Etcd, Get, GetResult, Watch, WatchBatch
from rdzv_etcd.group.pulse import Pulse

V = TypeVar("V")

_RETRY_S = 0.5


class Feed(Generic[V]):
    """A live view of a range. :attr:`view` is memory; reading it never blocks or raises."""

    def __init__(
        self,
        etcd: Etcd,
        clock: Clock,
        pulse: Pulse,
        *,
        request: Get,
        build: Callable[[GetResult], V],
        fold: Callable[[V, WatchBatch], V],
        notice: Callable[[V], None] | None = None,
    ) -> None:
        """``build`` makes the view from a read, ``fold`` applies a batch of changes to it;
        ``notice`` is told every new view."""
        self._etcd = etcd
        self._clock = clock
        self._pulse = pulse
        self._request = request
        self._build = build
        self._fold = fold
        self._notice = notice
        self._view: V | None = None
        self._revision = 0
        self._watch: Watch | None = None
        self.problem: RdzvEtcdError | None = None
        """Why the view cannot be trusted: a corrupt value, or etcd refusing us."""

    @property
    def view(self) -> V:
        if self._view is None:
            raise RuntimeError("the feed was not refreshed before its first use")
        return self._view

    def adopt(self, view: V) -> None:
        """Take over what the node itself has just written; the watch will tell the same again."""
        self._show(view)

    async def refresh(self, timeout_s: float | None = None) -> V:
        """Read the range anew. Raises :class:`~rdzv_etcd.errors.EtcdError`, StateCorruptError."""
        known = self._revision
        result = await self._etcd.get(self._request, timeout_s=timeout_s)
        if result.revision < known:
            # Data wiped or restored: the running watch waits for revisions that may never come.
            await self._stop_watch()
        elif result.revision < self._revision:
            return self.view  # the watch has brought something newer meanwhile
        try:
            view = self._build(result)
        except RdzvEtcdError as error:
            self._report(error)
            raise
        self._revision, self.problem = result.revision, None
        self._show(view)
        return view

    async def run(self) -> None:
        """Follow the range until cancelled; survives everything, reporting in :attr:`problem`."""
        while True:
            try:
                await self._follow()
            except WatchLostError:
                pass  # a fresh read below closes the gap
            except EtcdUnavailableError:
                await self._clock.sleep(_RETRY_S)
            except RdzvEtcdError as error:
                self._report(error)
                await self._clock.sleep(_RETRY_S)
            await self._refresh_quietly()

    async def _follow(self) -> None:
        watch = self._etcd.watch(
            self._request.key, self._request.range_end, start_revision=self._revision + 1
        )
        self._watch = watch
        try:
            async for batch in watch:
                view = self._fold(self.view, batch)
                self._revision = max(self._revision, batch.revision)
                self._show(view)
        finally:
            await watch.close()

    async def _refresh_quietly(self) -> None:
        while True:
            try:
                await self.refresh()
            except EtcdError as error:
                if not isinstance(error, EtcdUnavailableError):
                    self._report(error)
                await self._clock.sleep(_RETRY_S)
            except RdzvEtcdError:
                await self._clock.sleep(_RETRY_S)  # a corrupt value, reported by refresh
            else:
                return

    def _show(self, view: V) -> None:
        self._view = view
        if self._notice is not None:
            self._notice(view)
        self._pulse.beat()

    async def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()

    def _report(self, error: RdzvEtcdError) -> None:
        self.problem = error
        self._pulse.beat()
