"""A node that is its own worker: steps as in steps.py, in one process through all worlds.

Notes what torchrun's agents and their workers note, so that the phases can be told: to be in a
world is what a worker's life is there. ``worker_begin`` is when the new rank is known,
``worker_ready`` when the process group is there, ``stop_begin`` when the world is known to be over,
and ``stop_end`` when the collectives in it have ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rdzv_etcd
import rdzv_etcd.torch
from benchmarks.jobs import LIVES
from rdzv_etcd import Group, World


class Notes:
    """The node's two files."""

    def __init__(self, agent: Path, worker: Path) -> None:
        self._agent = agent.open("a", buffering=1)
        self._worker = worker.open("a", buffering=1)

    def of_agent(self, event: str, rank: int | None = None) -> None:
        line = {"event": event, "time": time.monotonic(), "rank": rank}
        self._agent.write(json.dumps(line) + "\n")

    def of_worker(self, event: str, world: World) -> None:
        life = os.getpid() * LIVES + world.round
        line = {"event": event, "time": time.monotonic(), "pid": life}
        who = {"rank": world.rank, "size": world.size, "restarts": 0}
        self._worker.write(json.dumps({**line, **who}) + "\n")


def main() -> None:
    args = parse_arguments()
    notes = Notes(args.trace, args.moments)
    torch.set_num_threads(1)
    with connect(args) as group:
        join = group.join

        @functools.wraps(join)
        def traced(timeout_s: float | None = None, *, because: str = "") -> World:
            notes.of_agent("rendezvous_begin")
            world = join(timeout_s, because=because)
            notes.of_agent("rendezvous_end", world.rank)
            notes.of_worker("worker_begin", world)
            return world

        group.join = traced
        rdzv_etcd.torch.run(
            group, functools.partial(train, notes, args.step_seconds), backend=args.collectives
        )


def connect(args: argparse.Namespace) -> Group:
    if dist.is_torchelastic_launched():
        return rdzv_etcd.torch.connect_worker()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    fewest, _, most = args.nodes.partition(":")
    conf: dict[str, Any] = dict(part.split("=", 1) for part in filter(None, args.conf.split(",")))
    nodes = int(fewest), int(most or fewest)
    return rdzv_etcd.connect(
        args.endpoint, job=args.job, nodes=nodes, local_addr=args.local_addr, **conf
    )


def train(notes: Notes, step_seconds: float, world: World) -> None:
    notes.of_worker("worker_ready", world)

    def note_end() -> None:
        world.wait_over()
        notes.of_agent("stop_begin")

    threading.Thread(target=note_end, daemon=True).start()
    try:
        while not world.should_yield:
            values = torch.tensor([world.rank + 1])
            dist.all_reduce(values)
            if values.item() != world.size * (world.size + 1) // 2:
                raise AssertionError(f"allreduce of 1..{world.size} gave {values.item()}")
            notes.of_worker("step", world)
            time.sleep(step_seconds)
    finally:
        notes.of_agent("stop_end")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--moments", type=Path, required=True)
    parser.add_argument("--endpoint")
    parser.add_argument("--job")
    parser.add_argument("--nodes")
    parser.add_argument("--local-addr")
    parser.add_argument("--conf", default="")
    parser.add_argument("--collectives", default="gloo")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    main()
