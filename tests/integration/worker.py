"""The workers of the container tests: an allreduce per step, checked, and a JSON line about it.

Runs inside the containers, where only torch is there for sure. Knows torchrun's environment; knows
no rendezvous backend.
"""

from __future__ import annotations

import json
import os
import time
import uuid

import torch
import torch.distributed as dist

STEP_S = 0.1
"""Stands for the step's computation."""


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
    dist.init_process_group("gloo")
    step = 0
    while True:
        step += 1
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        if total.item() != size * (size + 1) // 2:
            raise AssertionError(f"allreduce of 1..{size} gave {total.item()}")
        # One write: what torchrun's processes write at the same time shall not end up inside it.
        line = json.dumps({**report, "step": step, "time": time.time()})
        os.write(1, f"{line}\n".encode())
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
