"""A worker whose step is an allreduce, checked, with the moment of everything it does in its log.

Knows torchrun's environment; knows no rendezvous backend. Ends when the stop file appears.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

BEGIN_S = time.monotonic()

import torch  # noqa: E402 - the time its import takes belongs to the start of a worker
import torch.distributed as dist  # noqa: E402

READY_S = time.monotonic()


def main() -> None:
    args = parse_arguments()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    who = {"pid": os.getpid(), "rank": rank, "size": size}
    who["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = args.moments.open("a", buffering=1)

    def note(event: str, moment_s: float) -> None:
        log.write(json.dumps({"event": event, "time": moment_s, **who}) + "\n")

    note("worker_begin", BEGIN_S)
    note("worker_ready", READY_S)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(args.collectives)
    note("process_group", time.monotonic())
    while True:
        stop = args.stop_file.exists()
        values = torch.tensor([rank + 1, int(stop)], device=device)
        dist.all_reduce(values)
        total, stopping = values.tolist()  # on CUDA this waits for the result
        if total != size * (size + 1) // 2:
            raise AssertionError(f"allreduce of 1..{size} gave {total}")
        note("step", time.monotonic())
        if stopping:
            break
        time.sleep(args.step_seconds)
    dist.barrier()  # a process that exits right after a collective may abort gloo in another
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--collectives", default="gloo")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    return parser.parse_args()


if __name__ == "__main__":
    main()
