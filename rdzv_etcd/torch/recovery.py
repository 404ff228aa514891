"""``run``: the loop that continues in the same process when members are lost or join.

Decides whether an error comes from the end of a world or is the program's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rdzv_etcd import Group, World
from rdzv_etcd.arguments import has_run, runs_later, seconds
from rdzv_etcd.errors import JobClosedError, MisuseError, WorldOverError
from rdzv_etcd.text import named, shown
from rdzv_etcd.torch.process_group import (
    check_process_group,
    destroy_process_group,
    init_process_group,
)

_log = logging.getLogger("rdzv_etcd")

_SILENT_S = 5.0
"""After this a wait is logged at WARNING."""

_KNOWN_S = 2.0
"""How long an error that may come from the end of the world waits for that end to be known here: it
is known some 50 ms after a member is gone."""


def run(
    group: Group,
    train: Callable[[World], object],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    over_within_s: float = 30.0,
    **options: Any,
) -> None:
    """Call ``train(world)`` once in every world, until the job is finished.

    In it, torch's default process group is the world, as :func:`init_process_group` makes it from
    ``backend``, ``timeout`` and ``options``. ``train`` returns when ``world.should_yield``, or when
    it has called ``group.finish()`` because the work is done; otherwise a WARNING is logged.

    When a member is gone, a collective fails in ``train``. That error ends this call of ``train``
    only: as soon as the world is known to be over, the node joins the next one. If it is not over
    ``over_within_s`` seconds after a collective has failed, the error is raised. These count as a
    failed collective: torch's ``DistError``; a plain :class:`RuntimeError` that names gloo or
    torch's monitored barrier; and any plain :class:`RuntimeError` or :class:`ValueError` in a world
    that is over, or is over 2 s later if it has other members. The latter is logged at WARNING, as
    it may be the program's own. :class:`~rdzv_etcd.errors.WorldOverError` and
    :class:`~rdzv_etcd.errors.JobClosedError`, which waits on the world raise, also mean its end.
    Every other error is raised at once.

    A node that leaves with an error has destroyed its process group: the other nodes' collectives
    fail, and they continue without it. Blocks and raises as :meth:`rdzv_etcd.Group.worlds`, and
    raises :class:`~rdzv_etcd.errors.MisuseError` for arguments that cannot be meant, such as an
    async ``train``.
    """
    _check(train, backend, timeout)
    over_within_s = seconds(over_within_s)
    for world in group.worlds():
        try:
            init_process_group(world, backend, timeout, **options)
            returned = train(world)
            if not has_run(returned):
                raise MisuseError(
                    f"train returned an object of type {type(returned).__name__}, which has made "
                    "no step yet"
                )
            if not world.should_yield and group.closure() is None:
                _log.warning(
                    "[job %s] train() returned, but its world is not over and the job not finished "
                    "(group.finish()): this node joins again, which ends the world for all",
                    group.job,
                )
        except (RuntimeError, ValueError, WorldOverError, JobClosedError) as error:
            destroy_process_group()  # first: other members may wait for this one
            if _is_from_end_of_world(error):
                if not _wait_over(world, error, over_within_s):
                    raise
                _log.info("[job %s] %s: %s", group.job, world.change, _named(error))
            # NCCL's process group was aborted, and torch then calls it not initialized, a
            # ValueError. If other members may be gone, their end may not be known yet.
            elif type(error) in (RuntimeError, ValueError) and world.wait_over(
                min(over_within_s, _KNOWN_S) if world.size > 1 else 0.0
            ):
                _log.warning(
                    "[job %s] %s; this is taken for a consequence of it:",
                    *(group.job, world.change),
                    exc_info=error,
                )
            else:
                raise
        finally:
            destroy_process_group()


def _check(train: object, backend: object, timeout: object) -> None:
    """Raise MisuseError for what would fail in the first world only."""
    if not callable(train) or runs_later(train):
        raise MisuseError(
            f"train is {named(train)}; it must be a function that takes a World and does its work "
            "when it is called: no async function, and none with yield"
        )
    check_process_group(backend, timeout)


def _is_from_end_of_world(error: Exception) -> bool:
    """Whether it is the end of the world, or a collective that failed, judging by its own text."""
    if isinstance(error, WorldOverError | JobClosedError | dist.DistError):
        return True
    # gloo raises nothing better, and names its source file; with TORCH_DISTRIBUTED_DEBUG=DETAIL
    # there is a monitored barrier before each collective. A subclass is something else, such as
    # out of memory.
    text = str(error) if type(error) is RuntimeError else ""
    return "gloo" in text or "monitoredBarrier" in text


def _wait_over(world: World, error: Exception, limit_s: float) -> bool:
    """Wait until the world is over, and return whether it is."""
    if world.wait_over(min(limit_s, _SILENT_S)):
        return True
    if limit_s > _SILENT_S:
        _log.warning(
            "%r: a collective failed, but no member is known to be gone; waiting for %g s more "
            "before this node fails as well (%s)",
            world,
            limit_s - _SILENT_S,
            _named(error),
        )
    return world.wait_over(max(0.0, limit_s - _SILENT_S))


def _named(error: Exception) -> str:
    first, _, _ = str(error).partition(". ")  # the rest of gloo's is general advice
    return f"{type(error).__name__}: {shown(first, 300)}"
