"""A worker whose whole work is an allreduce per step, checked, and a JSON line about it.

Knows torchrun's environment and its own options; knows no rendezvous backend. It ends when the stop
file appears (all ranks in the same step) or after ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    args = parse_arguments()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart_count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    epoch = int(os.environ.get("RDZV_ETCD_EPOCH", "0"))
    dist.init_process_group("gloo")
    check_that_all_agree(epoch)
    for step in range(1, args.steps + 1):
        if restart_count == 0 and step == args.raise_at and rank == args.raise_rank:
            raise RuntimeError(f"rank {rank} was told to fail in step {step}")
        stop = args.stop_file is not None and args.stop_file.exists()
        values = torch.tensor([rank + 1, int(stop)])
        dist.all_reduce(values)
        total, stopping = values.tolist()
        if total != size * (size + 1) // 2:
            raise AssertionError(f"allreduce of 1..{size} gave {total}")
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": rank,
            "world_size": size,
            "restart_count": restart_count,
            "epoch": epoch,
            "step": step,
            "resumed_from": 0,
        }
        with args.step_log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if stopping:
            break
        time.sleep(args.step_seconds)  # stands for the step's computation
    dist.barrier()  # see leave_process_group() in examples/digits.py
    dist.destroy_process_group()


def check_that_all_agree(epoch: int) -> None:
    """Raise unless every rank was told the same world and the ranks are distinct."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    mine = (tuple(os.environ[name] for name in names), epoch)
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if set(everyone) != {mine}:
        raise AssertionError(f"the workers were told different worlds: {everyone}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--raise-at", type=int, help="fail in this step, in the first attempt only")
    parser.add_argument("--raise-rank", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
