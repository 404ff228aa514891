"""torch's elastic agent as a function: ``elastic_launch`` with ``rdzv_backend="etcd3"``.

    python examples/launchers/elastic_launch.py etcd-host:2379 my-job --nodes 1:4 --workers 2

This is what torchrun itself does, and what launchers do that were made from it, such as
``bagua.distributed.run``: the backend's name is all that they need to change. Start it on every
node. The workers get torchrun's environment, and what each returns comes back to the launcher.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from workers import nodes


def work(steps: int) -> tuple[int, float]:
    """What each worker does: it returns its rank and the sum of all ranks, once a step."""
    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for _ in range(steps):
        mine = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(mine)
        total += mine
    rank, epoch = dist.get_rank(), os.environ["RDZV_ETCD_EPOCH"]
    print(f"rank {rank} of {dist.get_world_size()}, epoch {epoch}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return rank, total.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--nodes", type=nodes, default=(1, 4), metavar="MIN:MAX")
    parser.add_argument("--workers", type=int, default=2, help="on each node")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    config = LaunchConfig(
        min_nodes=args.nodes[0],
        max_nodes=args.nodes[1],
        nproc_per_node=args.workers,
        run_id=args.job,
        rdzv_backend="etcd3",
        rdzv_endpoint=args.endpoint,
        rdzv_configs={"lease_ttl": 5},  # as in --rdzv-conf
        max_restarts=3,
        monitor_interval=0.1,
        start_method="spawn",
    )
    results = elastic_launch(config, work)(args.steps)
    for rank, total in sorted(results.values()):
        print(f"rank {rank} returned {total:g}")


if __name__ == "__main__":
    main()
