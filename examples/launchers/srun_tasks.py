"""Tasks of ``srun``: the rank is Slurm's task number, and all else comes from the group.

    srun --ntasks=8 python examples/launchers/srun_tasks.py etcd-host:2379

Each task is a member. ``rank_key="SLURM_PROCID"`` makes the ranks follow that variable, so that
rank and task number are the same; ranks of one host are neighbours then. If a task is lost, the
others wait for it to be started again, for ``join_timeout`` at most, and say whom they wait for.
"""

from __future__ import annotations

import argparse
import os

import rdzv_etcd
from rdzv_etcd.errors import JobClosedError, WorldOverError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("--local-addr", help="where others reach this host, if not by its name")
    args = parser.parse_args()
    slurm = os.environ
    node = slurm["SLURM_NODEID"]
    with rdzv_etcd.connect(
        args.endpoints,
        job=f"{slurm['SLURM_JOB_ID']}.{slurm['SLURM_STEP_ID']}",
        nodes=int(slurm["SLURM_NTASKS"]),
        rank_key="SLURM_PROCID",
        data={"node": node, "task": slurm["SLURM_PROCID"]},
        local_addr=args.local_addr,
    ) as group:
        for world in group.worlds():
            try:
                here = [member.rank for member in world.members if member.data["node"] == node]
                print(
                    f"task {slurm['SLURM_PROCID']}: rank {world.rank} of {world.size}, "
                    f"local rank {here.index(world.rank)} of {len(here)} on node {node}, "
                    f"master {world.master.address}:{world.master.port}",
                    flush=True,
                )
                world.barrier("all have worked")
                if world.rank == 0:
                    group.finish("all tasks are done")
                world.wait_over()
            except (WorldOverError, JobClosedError):
                pass


if __name__ == "__main__":
    main()
