"""A worker that counts steps, with a JSON line about each; ``--allreduce``: and does a checked one.

Knows torchrun's environment and its own options; knows no rendezvous backend, and without
``--allreduce`` nothing of torch, which takes longer to load than all else that most tests do. It
ends when the stop file appears (with ``--allreduce`` all ranks in the same step) or after
``--steps``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


class Steps:
    """The options of a worker, and what it reports."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.count: int = options.steps
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.epoch = int(os.environ.get("RDZV_ETCD_EPOCH", "0"))
        self._restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._options = options

    @property
    def is_to_stop(self) -> bool:
        stop_file: Path | None = self._options.stop_file
        return stop_file is not None and stop_file.exists()

    def begin(self, step: int) -> None:
        """Raise ``RuntimeError`` if the options ask for that in this step."""
        fails_here = (step, self.rank) == (self._options.raise_at, self._options.raise_rank)
        if self._restarts == 0 and fails_here:
            raise RuntimeError(f"rank {self.rank} was told to fail in step {step}")

    def report(self, step: int) -> None:
        line = {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": self.size,
            "restart_count": self._restarts,
            "epoch": self.epoch,
            "step": step,
            "resumed_from": 0,
        }
        with self._options.step_log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def compute(self) -> None:
        """Take the time of a step."""
        time.sleep(self._options.step_seconds)


def alone(steps: Steps) -> None:
    for step in range(1, steps.count + 1):
        steps.begin(step)
        steps.report(step)
        if steps.is_to_stop:
            break
        steps.compute()


def together(steps: Steps) -> None:
    import torch  # noqa: PLC0415 - see above
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")
    check_that_all_agree(steps.epoch)
    for step in range(1, steps.count + 1):
        steps.begin(step)
        values = torch.tensor([steps.rank + 1, int(steps.is_to_stop)])
        dist.all_reduce(values)
        total, stopping = values.tolist()
        if total != steps.size * (steps.size + 1) // 2:
            raise AssertionError(f"allreduce of 1..{steps.size} gave {total}")
        steps.report(step)
        if stopping:
            break
        steps.compute()
    dist.barrier()  # see leave_process_group() in examples/digits.py
    dist.destroy_process_group()


def check_that_all_agree(epoch: int) -> None:
    """Raise unless all ranks see the same world and the ranks are distinct."""
    import torch.distributed as dist  # noqa: PLC0415 - see above

    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    mine = (tuple(os.environ[name] for name in names), epoch)
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if set(everyone) != {mine}:
        raise AssertionError(f"the workers see different worlds: {everyone}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--raise-at", type=int, help="fail in this step, in the first attempt only")
    parser.add_argument("--raise-rank", type=int, default=0)
    parser.add_argument("--allreduce", action="store_true")
    options = parser.parse_args()
    if options.allreduce:
        from torch.distributed.elastic.multiprocessing import errors  # noqa: PLC0415 - see above

        errors.record(together)(Steps(options))
    else:
        alone(Steps(options))


if __name__ == "__main__":
    main()
