"""JAX on several hosts: ``jax.distributed.initialize`` from a world, and on without a lost process.

    python examples/launchers/jax_processes.py etcd-host:2379 my-job --nodes 1:4

Start it on every host. JAX's runtime cannot lose a process: the others abort, or find out after its
own heartbeat of 100 s. So each world has a JAX process of its own, which the launcher ends as soon
as the world is over, and starts again in the next one with what is left.
"""

from __future__ import annotations

import argparse

from workers import Place, launch, nodes

import rdzv_etcd


def work(place: Place, steps: int) -> None:
    """What each JAX process does: add up over all processes, step by step."""
    import jax  # noqa: PLC0415 - the launcher needs none
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.experimental import multihost_utils  # noqa: PLC0415

    jax.distributed.initialize(
        coordinator_address=f"{place.address}:{place.port}",
        num_processes=place.size,
        process_id=place.rank,
    )
    for step in range(1, steps + 1):
        ranks = multihost_utils.process_allgather(jnp.array([float(place.rank)]))
        print(
            f"step {step}: {jax.process_count()} processes, {jax.device_count()} devices, "
            f"sum of ranks {ranks.sum():g}",
            flush=True,
        )
    jax.distributed.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", help="of etcd, such as etcd-1:2379,etcd-2:2379")
    parser.add_argument("job")
    parser.add_argument("--nodes", type=nodes, default=(1, 4), metavar="MIN:MAX")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    with rdzv_etcd.connect(args.endpoints, job=args.job, nodes=args.nodes) as group:
        launch(group, work, args.steps)


if __name__ == "__main__":
    main()
