"""Replica groups, as in torchft: each group of ranks is one member, and a step is what the healthy
groups do together.

    python examples/launchers/replica_groups.py etcd-host:2379 my-job --name group-a --ranks 2

Start one per replica group. The model is replicated: every group computes the gradient of its own
data with its ranks, the groups average theirs, and all apply the result. A step counts only if all
groups of the quorum have given their gradient; if one is lost meanwhile, the step is done again by
those that are left, who need not restart their ranks. A group that comes (back) gets the newest
model from the others before its first step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from workers import end_with_launcher, nodes

import rdzv_etcd
from rdzv_etcd.errors import JobClosedError, WorldOverError

TARGET = 10.0
"""What the model, a single number, is to become."""


@dataclass
class Model:
    step: int = 0
    weight: float = 0.0


def gradient(weight: float, rank: int) -> float:
    """What one rank computes in a process of its own."""
    return (weight - TARGET) * (1.0 + 0.1 * rank)


def heal(world: rdzv_etcd.World, model: Model) -> None:
    """Take the newest model that any group has. In a real training only its step goes through etcd,
    and the model itself from group to group."""
    models = world.exchange(json.dumps([model.step, model.weight]).encode())
    model.step, model.weight = max(map(json.loads, models))


def train(world: rdzv_etcd.World, pool: Executor, ranks: int, model: Model, steps: int) -> None:
    """Do steps together until there are enough, or until the quorum has to change.

    Raises :class:`WorldOverError` if the quorum changes within a step. It may have counted for some
    of the groups: :func:`heal` sees to that.
    """
    while model.step < steps and not world.over:
        mine = fmean(pool.map(gradient, [model.weight] * ranks, range(ranks)))
        gradients = world.exchange(json.dumps(mine).encode())
        model.weight -= 0.1 * fmean(map(json.loads, gradients))
        model.step += 1
        print(f"step {model.step}: {world.size} groups, {model.weight:.6f}", flush=True)
        time.sleep(0.05)  # stands for the step's computation


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--name", required=True, help="of this replica group")
    parser.add_argument("--ranks", type=int, default=2, help="in this group")
    parser.add_argument("--groups", type=nodes, default=(1, 4), metavar="MIN:MAX")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    model = Model()
    with (
        ProcessPoolExecutor(
            args.ranks, multiprocessing.get_context("spawn"), initializer=end_with_launcher
        ) as pool,
        rdzv_etcd.connect(
            args.endpoints,
            job=args.job,
            nodes=args.groups,
            data={"group": args.name, "ranks": args.ranks},
        ) as group,
    ):
        for world in group.worlds():
            try:
                names = ", ".join(str(member.data["group"]) for member in world.members)
                print(f"quorum: {names}", flush=True)
                heal(world, model)
                train(world, pool, args.ranks, model, args.steps)
                if model.step >= args.steps:
                    world.barrier("all have the last step")
                    if world.rank == 0:
                        group.finish(f"step {model.step} is done")
                    world.wait_over()
            except (WorldOverError, JobClosedError):
                pass
    print(f"ended at step {model.step} with {model.weight:.6f}", flush=True)


if __name__ == "__main__":
    main()
