"""Waits for other members of a world, which end with it, and are logged if they are long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rdzv_etcd.errors import (
    EtcdError,
    RendezvousFailedError,
    StoreTimeoutError,
    WorldClosedError,
    WorldOverError,
)
from rdzv_etcd.log import LineTimes
from rdzv_etcd.names import display_names
from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Closure
from rdzv_etcd.protocol.world_end import end_of
from rdzv_etcd.world_change import WorldChange

T = TypeVar("T")

_GRACE_S = 1.0
"""How long an answer may still take when the world ends, where nothing can be asked again."""


async def until_over(node: Node, seat: Seat, what: str) -> RendezvousFailedError:
    """Wait until the world is over; return the error of a call that waited for ``what``.

    Raises RendezvousFailedError if this node leaves, or cannot continue.
    """
    change = await node.over(seat)
    closure = node.closure()
    if closure is not None:
        return _closed(what, node.context.settings.job_id, closure, change)
    return _over(what, seat, change)


async def until_closed(node: Node, what: str) -> WorldClosedError:
    """Wait until the job is closed, whatever becomes of the world before; raises as
    :func:`until_over`."""
    closure = await node.closed()
    return _closed(what, node.context.settings.job_id, closure, end_of(closure))


async def unless_over(
    node: Node,
    seat: Seat,
    what: str,
    work: Callable[[], Coroutine[Any, Any, T]],
    last_look: Callable[[], Coroutine[Any, Any, T]] | None = None,
    *,
    grace_s: float = _GRACE_S,
    even_if_over: bool = False,
) -> T:
    """Do ``work``, which waits for other members, unless the world is over or ends meanwhile.

    Whatever the others did before the end still counts: ``last_look`` is the same work without the
    wait, and raises StoreTimeoutError if it is not done. Without one, ``work`` gets ``grace_s``.
    ``even_if_over``: it continues in a world that is over, until the job is closed.
    Raises the errors of ``work``, WorldOverError (a WorldClosedError if the job was closed), and
    RendezvousFailedError if this node leaves, or cannot continue.
    """
    working = asyncio.ensure_future(work())
    end = until_closed(node, what) if even_if_over else until_over(node, seat, what)
    over = asyncio.ensure_future(end)
    try:
        await _first_of(node, what, working, over)
        if not working.done():
            if last_look is None:
                await asyncio.wait({working}, timeout=grace_s)
            elif over.exception() is None:  # this node is still there
                with contextlib.suppress(StoreTimeoutError, EtcdError):
                    return await last_look()
        if not working.done():
            raise over.result()
        return working.result()
    finally:
        for task in (working, over):
            task.cancel()
        await asyncio.gather(working, over, return_exceptions=True)


async def _first_of(node: Node, what: str, *tasks: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; log at WARNING that this node waits for ``what``, if the wait
    is long."""
    context, lines = node.context, LineTimes()
    began_s = context.clock.now_s()
    while True:
        waited_s = context.clock.now_s() - began_s
        if lines.is_due(waited_s):
            awaited = "the others to finish: its own work is done" if node.has_finished else what
            context.log.warn(f"waiting {waited_s:.0f} s for {awaited}")
        done, _ = await asyncio.wait(
            tasks, return_when=asyncio.FIRST_COMPLETED, timeout=lines.next_s - waited_s
        )
        if done:
            return


def _over(what: str, seat: Seat, change: WorldChange) -> WorldOverError:
    return WorldOverError(
        f"{what}: round {seat.round} is over, join the next one: {change}", change=change
    )


def _closed(what: str, job_id: str, closure: Closure, change: WorldChange) -> WorldClosedError:
    return WorldClosedError(
        f"{what}: job {job_id!r} was closed by {display_names([closure.by])}: {closure.reason}",
        closed_by=closure.by,
        reason=closure.reason,
        succeeded=closure.succeeded,
        change=change,
    )
