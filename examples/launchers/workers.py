"""A launcher to copy: it runs worker processes in each world, until one world has done the work.

Workers are processes of their own because frameworks cannot leave a broken world: gloo, NCCL and
JAX's runtime abort, or wait for a dead peer. They are started with ``spawn``, as the library does
not survive a fork, and know nothing of the group: only their :class:`Place`. The other examples use
this one; see ``multiprocessing_workers.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import rdzv_etcd
from rdzv_etcd.errors import JobClosedError, WorldOverError

OTHERS_TO_BLAME_S = 15.0
"""A worker that fails because another node has died may be quicker than the news of that, which
takes a little longer than ``lease_ttl`` (10 s) at worst."""


@dataclass(frozen=True)
class Place:
    """A worker's place in a world: plain values, to be sent to another process."""

    rank: int
    size: int
    """Workers of the whole world."""
    local_rank: int
    node_rank: int
    address: str
    port: int
    """Where rank 0 is reached; free for it to listen on."""
    epoch: int
    """Grows from world to world: store it with checkpoints."""


def launch(
    group: rdzv_etcd.Group, work: Callable[..., None], *arguments: Any, count: int = 1
) -> None:
    """Run ``work(place, *arguments)`` in ``count`` processes on each node, again in every world,
    until it has ended well on all nodes of one. Fails the job, and raises :class:`JobClosedError`,
    if a worker fails in a world that is not over."""
    for world in group.worlds():
        done = run_workers(world, work, *arguments, count=count)
        try:
            if done:
                print("the workers of this node have ended; waiting for the others", flush=True)
                world.barrier("all workers have ended", timeout_s=3600)
                if world.rank == 0:
                    group.finish("all workers have ended well")
            elif not world.over:
                print(f"a worker failed; is another node gone? {world}", flush=True)
                if not world.wait_over(OTHERS_TO_BLAME_S):
                    group.fail("a worker failed")
        except (WorldOverError, JobClosedError):
            pass  # the next pass of the loop knows what to do
        if not done:
            print(f"world {world.round} is over: {world.change}", flush=True)


def run_workers(
    world: rdzv_etcd.World, work: Callable[..., None], *arguments: Any, count: int = 1
) -> bool:
    """Run ``work(place, *arguments)`` in ``count`` processes until all have ended, one has failed,
    or the world is over; tell whether all ended well. None is left afterwards."""
    listener = world.take_listener()
    if listener is not None:
        listener.close()  # the worker of rank 0 listens there itself, from in a moment on
    context = multiprocessing.get_context("spawn")
    places = [
        Place(
            rank=world.rank * count + local_rank,
            size=world.size * count,
            local_rank=local_rank,
            node_rank=world.rank,
            address=world.master.address,
            port=world.master.port,
            epoch=world.epoch,
        )
        for local_rank in range(count)
    ]
    processes = [context.Process(target=_worker, args=(work, it, arguments)) for it in places]
    try:
        for process in processes:
            process.start()
        _wait(world, processes)
        return all(process.exitcode == 0 for process in processes)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def _wait(world: rdzv_etcd.World, processes: Sequence[BaseProcess]) -> None:
    over, tell = multiprocessing.Pipe(duplex=False)

    def watch() -> None:
        world.wait_over()
        tell.close()  # that wakes whoever waits for the other end

    threading.Thread(target=watch, daemon=True).start()
    running = list(processes)
    while running and not world.over and not any(process.exitcode for process in running):
        wait([over, *(process.sentinel for process in running)])
        running = [process for process in running if process.exitcode != 0]


def _worker(work: Callable[..., None], place: Place, arguments: tuple[Any, ...]) -> None:
    end_with_launcher()
    work(place, *arguments)


def end_with_launcher() -> None:
    """Let this process end when the one that started it does, even by SIGKILL: the others may have
    given its ranks away by then. To be called in the worker; does not block."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes: ``2:4``, or one number for both."""
    fewest, _, most = text.partition(":")
    return int(fewest), int(most or fewest)
