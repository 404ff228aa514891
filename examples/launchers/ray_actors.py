"""Ray: one actor per node. Ray starts the actors, and lost ones again; the group gives them ranks.

    python examples/launchers/ray_actors.py etcd-host:2379 my-job --actors 4

Ray notices that an actor has died, but it has no ranks, and no barrier that ends when a member is
lost. Here a lost actor is out of the world some 50 ms later, the others go on, and the one that Ray
starts in its place joins them.
"""

from __future__ import annotations

import argparse
import os
import time

import ray

import rdzv_etcd
from rdzv_etcd.errors import JobClosedError, WorldOverError


class Node:
    """A node of the job, in a process of Ray's."""

    def run(self, endpoints: str, job: str, actors: int, steps: int) -> str:
        """Take part until the job is finished; return what became of it."""
        step = 0
        with rdzv_etcd.connect(
            endpoints,
            job=job,
            nodes=(1, actors),
            after_end="finish",  # for an actor that comes back when the others are done
        ) as group:
            for world in group.worlds():
                try:
                    step = max(map(int, world.exchange(str(step).encode())))
                    place = f"rank {world.rank} of {world.size}"
                    print(f"{place} begins at step {step}", flush=True)
                    while not world.over and step < steps:
                        world.exchange(b"")  # stands for what the step exchanges
                        step += 1
                        if step % 20 == 0:
                            print(f"{place}, step {step}, pid {os.getpid()}", flush=True)
                        time.sleep(0.1)  # stands for the step's computation
                    if step >= steps:
                        world.barrier("all have the last step")
                        group.finish("all steps are done")
                except (WorldOverError, JobClosedError):
                    pass
        return f"ended at step {step}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    ray.init(include_dashboard=False)  # or the cluster that RAY_ADDRESS names
    actor = ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=-1)(Node)
    actors = [actor.remote() for _ in range(args.actors)]
    runs = [it.run.remote(args.endpoints, args.job, args.actors, args.steps) for it in actors]
    for number, result in enumerate(ray.get(runs)):
        print(f"actor {number}: {result}", flush=True)


if __name__ == "__main__":
    main()
