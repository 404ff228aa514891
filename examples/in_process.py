"""Train a small network on handwritten digits in processes that are never restarted.

    python examples/in_process.py --embed --processes 3

starts three, with an etcd of their own. Kill any of them, and the others go on within a second,
from the step they were in; start more of them, on any host that reaches etcd, and they take part:

    python examples/in_process.py --etcd=etcd-host:2379 --job=digits --nodes=2:4

With several workers per host, torchrun starts them, and restarts those of a host of which one has
died. The same command on each host:

    torchrun --nnodes=2:4 --nproc-per-node=2 --rdzv-backend=etcd3 --rdzv-endpoint=etcd-host:2379 \\
        --rdzv-id=digits --rdzv-conf=in_process=1 --max-restarts=5 examples/in_process.py

Nothing is loaded from a checkpoint: whoever has made the most steps gives its state to the others.
A batch is divided among the members, however many there are. How often each sample has been used is
summed after the gradients, and only then does anything change. So a member has made a step with all
that belongs to it or not at all, and at the end of each pass every sample has been used once.

The network and the data are those of digits.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import SEED, digits, lasting_at_least, network
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rdzv_etcd
import rdzv_etcd.torch


class Training:
    """All that a member needs to go on: the parameters, and the position in the data."""

    def __init__(self, batch_size: int, learning_rate: float) -> None:
        torch.manual_seed(SEED)
        (self.images, self.labels), (self.test_images, self.test_labels) = (
            part.tensors for part in digits()
        )
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.batch_size = batch_size
        self.step = self.pass_number = self.sample = 0
        self.loss = float("nan")
        self.used = torch.zeros(len(self.labels))
        """How often each sample was used in this pass."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": [self.step, self.pass_number, self.sample],
            "used": self.used,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.pass_number, self.sample = state["position"]
        self.used = state["used"]

    def make_step(self, parallel: DistributedDataParallel, rank: int, size: int) -> None:
        """Make one step together with the other members. Nothing has changed if that fails."""
        generator = torch.Generator().manual_seed(SEED + self.pass_number)
        order = torch.randperm(len(self.labels), generator=generator)  # the same on all members
        batch = order[self.sample : self.sample + self.batch_size]
        mine = batch[rank::size]
        outputs = parallel(self.images[mine])
        loss = nn.functional.cross_entropy(outputs, self.labels[mine], reduction="sum") / len(batch)
        self.optimizer.zero_grad()
        (size * loss).backward()  # the members' gradients are averaged, and their sum is wanted
        together = torch.zeros(len(self.used) + 1)
        together[mine] = 1
        together[-1] = loss.detach()
        dist.all_reduce(together)
        self.optimizer.step()
        self.loss = together[-1].item()
        self.used += together[:-1]
        self.step += 1
        self.sample += len(batch)
        if self.sample == len(self.labels):
            self._end_pass()

    def _end_pass(self) -> None:
        if not torch.all(self.used == 1):
            raise AssertionError(f"samples of pass {self.pass_number} were not used once each")
        self.used.zero_()
        self.pass_number, self.sample = self.pass_number + 1, 0

    @torch.no_grad()
    def accuracy(self) -> float:
        right: Tensor = self.model(self.test_images).argmax(dim=1) == self.test_labels
        return right.float().mean().item()

    def digest(self) -> str:
        """The same on two members if their parameters are, bit by bit."""
        flat = nn.utils.parameters_to_vector(self.model.parameters())
        return hashlib.sha256(flat.detach().numpy().tobytes()).hexdigest()[:16]


def work(args: argparse.Namespace) -> None:
    """Be one member of the job until it is finished."""
    torch.set_num_threads(1)
    training = Training(args.batch_size, args.learning_rate)
    with connect(args) as group:

        def train(world: rdzv_etcd.World) -> None:
            newest = rdzv_etcd.torch.broadcast_newest(world, training.step, training)
            report(world, f"world of {world.size} goes on from step {newest}")
            parallel = DistributedDataParallel(training.model)
            while training.pass_number < args.passes:
                if world.should_yield:
                    return
                with lasting_at_least(args.min_step_seconds):
                    training.make_step(parallel, world.rank, world.size)
                log_step(args.step_log, world, training)
                if training.step % args.print_every == 0:
                    report(world, f"step {training.step}  loss {training.loss:.3f}")
            world.barrier("every member has made the last step")
            report(world, f"test accuracy: {training.accuracy():.1%}")
            group.finish("all passes are done")

        rdzv_etcd.torch.run(group, train, backend="gloo")


def connect(args: argparse.Namespace) -> rdzv_etcd.Group:
    if dist.is_torchelastic_launched():  # torchrun's command line says what the options say here
        return rdzv_etcd.torch.connect_worker()
    fewest, _, most = args.nodes.partition(":")
    nodes = int(fewest), int(most or fewest)
    options = {"last_call_timeout": args.last_call, "lease_ttl": args.lease_ttl}
    if args.embed:
        options["embed"] = True
    return rdzv_etcd.connect(args.etcd, job=args.job, nodes=nodes, **options)


def report(world: rdzv_etcd.World, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)


def log_step(path: Path | None, world: rdzv_etcd.World, training: Training) -> None:
    """Append a JSON line; one short write to a file opened for appending is not torn."""
    if path is None:
        return
    line = {
        "time": time.monotonic(),
        "pid": os.getpid(),
        "rank": world.rank,
        "world_size": world.size,
        "epoch": world.epoch,
        "step": training.step,
        "passes": training.pass_number,
        "loss": training.loss,
        "parameters": training.digest(),
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training that goes on in the same processes.")
    parser.add_argument("--etcd", default="localhost:2379", help="its endpoints")
    parser.add_argument("--embed", action="store_true", help="start one there if there is none")
    parser.add_argument("--job", default="digits-in-process")
    parser.add_argument("--nodes", default="2:4", help="the fewest and the most")
    parser.add_argument(
        "--last-call", type=float, default=3.0, help="wait for more than the fewest"
    )
    parser.add_argument(
        "--lease-ttl", type=int, default=10, help="when a silent host is lost, in s"
    )
    parser.add_argument("--processes", type=int, default=1, help="to start here")
    parser.add_argument("--passes", type=int, default=12, help="over the training data")
    parser.add_argument("--batch-size", type=int, default=60, help="of the whole world")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-log", type=Path, help="append a JSON line for every step")
    parser.add_argument(
        "--min-step-seconds", type=float, default=0.0, help="let a step take at least this long"
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    if args.processes == 1:
        work(args)
        return
    context = multiprocessing.get_context("spawn")  # a forked process could not use the library
    processes = [context.Process(target=work, args=(args,)) for _ in range(args.processes)]
    for process in processes:
        process.start()
        print(f"process {process.pid} started", flush=True)
    for process in processes:
        process.join()
    sys.exit(all(process.exitcode != 0 for process in processes))


if __name__ == "__main__":
    main()
