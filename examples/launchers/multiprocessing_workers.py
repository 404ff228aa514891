"""A launcher of one's own on plain ``multiprocessing``, with workers for each world.

    python examples/launchers/multiprocessing_workers.py etcd-host:2379 my-job --nodes 1:4

Start it on every node. Nodes may come, leave and die at any time: each change ends the world, the
workers of it are ended, and new ones go on in the next. All of that is in ``workers.py``.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from workers import Place, launch, nodes

import rdzv_etcd


def work(place: Place, steps: int, step_seconds: float) -> None:
    """What each worker does: count the workers together, step by step."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.address}:{place.port}",
        rank=place.rank,
        world_size=place.size,
    )
    for step in range(1, steps + 1):
        total = torch.ones(1)
        dist.all_reduce(total)
        if place.local_rank == 0:
            print(f"step {step}: {total.item():.0f} workers, epoch {place.epoch}", flush=True)
        time.sleep(step_seconds)  # stands for the step's computation
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--nodes", type=nodes, default=(1, 4), metavar="MIN:MAX")
    parser.add_argument("--workers", type=int, default=2, help="on each node")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    args = parser.parse_args()
    with rdzv_etcd.connect(args.endpoints, job=args.job, nodes=args.nodes, lease_ttl=5) as group:
        launch(group, work, args.steps, args.step_seconds, count=args.workers)


if __name__ == "__main__":
    main()
