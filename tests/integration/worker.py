"""The workers of the container tests: a JSON line per step; ``--allreduce``: and a checked one.

Runs inside the containers, where only torch is there for sure. Knows torchrun's environment; knows
no rendezvous backend, and without ``--allreduce`` nothing of torch, whose import is most of the
work of a node that is started or whose world changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable

STEP_S = 0.1
"""Stands for the step's computation."""


def checked_allreduce(rank: int, size: int) -> Callable[[], None]:
    """Return what does one with all the others, and raises ``AssertionError`` if it is wrong."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")

    def allreduce() -> None:
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        if total.item() != size * (size + 1) // 2:
            raise AssertionError(f"allreduce of 1..{size} gave {total.item()}")

    return allreduce


def nothing() -> None:
    """The work of a step without ``--allreduce``."""


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = {
        "attempt": uuid.uuid4().hex,  # process ids begin again when a container is started again
        "rank": rank,
        "world_size": size,
        "epoch": int(os.environ["RDZV_ETCD_EPOCH"]),
        "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "master_addr": os.environ["MASTER_ADDR"],
        "master_port": int(os.environ["MASTER_PORT"]),
    }
    work = checked_allreduce(rank, size) if "--allreduce" in sys.argv else nothing
    step = 0
    while True:
        step += 1
        work()
        # One write: what torchrun's processes write at the same time shall not end up inside it.
        line = json.dumps({**report, "step": step, "time": time.time()})
        os.write(1, f"{line}\n".encode())
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
