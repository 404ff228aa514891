"""Train a classifier of images as torchelastic's ImageNet example does, on a small data set.

    torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=3 --rdzv-id=digits \\
        --rdzv-backend=etcd3 --rdzv-endpoint=etcd-host:2379 \\
        examples/elastic/imagenet_style.py --checkpoint-file=/var/tmp/digits.pt

``State``, ``load_checkpoint``, ``save_checkpoint``, ``train`` and ``validate`` are that example's,
and so is the way in which nodes without a common disk begin: each has a checkpoint of its own, and
the newest is broadcast from the node that has it. What is different:

* An epoch goes on where it was when the world changed, with ``ElasticDistributedSampler``, and each
  sample is used once in it, whatever the worlds' sizes are. At most ``--checkpoint-every`` steps
  are lost and made again.
* Each checkpoint has the rendezvous' epoch (``RDZV_ETCD_EPOCH``) as a fence: what is left of an
  older world cannot overwrite it.
* A batch is one of the whole world, so that the learning rate fits a world of any size.

The network and the data, 1,440 images of 8 x 8 pixels, are those of examples/digits.py.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
from digits import (
    StaleWorldError,
    World,
    accuracy,
    digits,
    enter_process_group,
    lasting_at_least,
    leave_process_group,
    log_step,
    network,
    report,
)

SEED = 7


class State:
    """What a checkpoint holds: the model, the optimizer, and how far the training is."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.epoch = 0
        self.sample = 0
        """How many samples of this epoch have been used."""
        self.step = 0
        self.best_acc1 = 0.0
        self.resumed_from = (0, 0)
        """The step of the checkpoint that was loaded, and its fence."""

    def capture_snapshot(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "sample": self.sample,
            "step": self.step,
            "best_acc1": self.best_acc1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def apply_snapshot(self, snapshot: dict[str, Any]) -> None:
        self.epoch, self.sample = snapshot["epoch"], snapshot["sample"]
        self.step, self.best_acc1 = snapshot["step"], snapshot["best_acc1"]
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])


# --- checkpoints --------------------------------------------------------------------------------


def save_checkpoint(state: State, path: Path, world: World) -> None:
    """Replace this node's checkpoint. Raises :class:`StaleWorldError` if a newer world has."""
    file = io.BytesIO()
    torch.save({"fence": world.epoch, **state.capture_snapshot()}, file)
    _replace(path, file.getvalue(), world)


def _replace(path: Path, content: bytes, world: World) -> None:
    """A reader sees the old checkpoint or the new one, never a part."""
    if path.exists() and (newest := _unpack(path.read_bytes())["fence"]) > world.epoch:
        raise StaleWorldError(
            f"{path} was written in the rendezvous' epoch {newest}, this world's is {world.epoch}: "
            "either this world is over, or etcd is a new one; then use another --checkpoint-file, "
            f"or start torchrun with RDZV_ETCD_EPOCH={newest}"
        )
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(state: State, path: Path, world: World) -> None:
    """Load the newest checkpoint of all nodes into every rank; every node keeps it from now on.

    Collective: every rank calls it. Newest is what has most steps; of several, what the newest
    world has written. Without any checkpoint the training starts from the beginning.
    """
    for left_over in path.parent.glob(f"{path.name}.*.tmp"):  # of workers that were killed
        left_over.unlink(missing_ok=True)
    content = path.read_bytes() if path.exists() else b""
    mine = (-1, -1)
    if content:
        snapshot = _unpack(content)
        mine = (snapshot["step"], snapshot["fence"])
    everyone: list[tuple[int, int]] = [mine] * world.size
    dist.all_gather_object(everyone, mine)
    if max(everyone) == (-1, -1):
        return
    newest = everyone.index(max(everyone))
    sent = [content]
    dist.broadcast_object_list(sent, src=newest)
    state.apply_snapshot(_unpack(sent[0]))
    state.resumed_from = everyone[newest]
    if world.local_rank == 0 and content != sent[0]:
        _replace(path, sent[0], world)  # the node that has sent it may be gone before the next one


def _unpack(content: bytes) -> dict[str, Any]:
    snapshot: dict[str, Any] = torch.load(
        io.BytesIO(content), map_location="cpu", weights_only=True
    )
    return snapshot


# --- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    images: Tensor
    labels: Tensor
    numbers: Tensor
    """Of the samples, in the data set."""
    count: int
    """So many are to be used. The sampler repeats samples where they do not divide evenly among the
    ranks, so that every rank has the same number of batches."""
    total: int
    """How many samples all ranks use in this step."""


@dataclass(frozen=True)
class Stretch:
    """The part of an epoch up to the next checkpoint; it is divided among the ranks."""

    begin: int
    end: int
    loader: DataLoader[Any]
    world: World

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's batches; every rank has as many, and the last ones may be empty."""
        mine = len(range(self.world.rank, self.end - self.begin, self.world.size))
        left = self.end - self.begin
        for images, labels, numbers in self.loader:
            count = min(mine, len(labels))
            total = min(left, len(labels) * self.world.size)
            yield Batch(images, labels, numbers, count, total)
            mine -= count
            left -= total


def next_stretch(
    data: TensorDataset, state: State, world: World, batch_size: int, checkpoint_every: int
) -> Stretch:
    """Return what comes next in the present epoch, as this rank sees it.

    An epoch has an order of its own, the same on all ranks of all worlds. So what it has used is
    always the beginning of that, which is all that ``ElasticDistributedSampler`` can leave out: it
    shuffles the rest anew for each start.
    """
    generator = torch.Generator().manual_seed(SEED + state.epoch)
    order = torch.randperm(len(data), generator=generator).tolist()
    end = state.sample + checkpoint_every * batch_size
    if len(order) - end < batch_size:  # no rest: it could be too small for all ranks
        end = len(order)
    part = Subset(data, order[:end])
    sampler = ElasticDistributedSampler(
        part, num_replicas=world.size, rank=world.rank, start_index=state.sample
    )
    sampler.set_epoch(state.epoch)
    per_rank = -(-batch_size // world.size)
    return Stretch(state.sample, end, DataLoader(part, per_rank, sampler=sampler), world)


# --- training -----------------------------------------------------------------------------------


def train(
    stretch: Stretch,
    model: DistributedDataParallel,
    state: State,
    device: torch.device,
    args: argparse.Namespace,
) -> None:
    """Make the steps of one stretch."""
    world = stretch.world
    for batch in stretch.batches():
        state.step += 1
        # Before it is made: who is killed in a step may have had a part in it.
        log_step(
            args.step_log,
            world,
            state.step,
            state.resumed_from[0],
            resumed_fence=state.resumed_from[1],
            training_epoch=state.epoch,
            samples=batch.numbers[: batch.count].tolist(),
        )
        with lasting_at_least(args.min_step_seconds):
            outputs = model(batch.images.to(device))[: batch.count]
            labels = batch.labels[: batch.count].to(device)
            loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
            state.optimizer.zero_grad()
            # The mean over all samples of the step: gradients are averaged over the ranks.
            (loss * world.size / batch.total).backward()
            state.optimizer.step()
        if state.step % args.print_freq == 0:
            share = loss.item() / max(1, batch.count)
            report(world, f"epoch {state.epoch}  step {state.step}  loss {share:.3f}")
    state.sample = stretch.end


def validate(state: State, data: TensorDataset, world: World, device: torch.device) -> float:
    """Return the share of test images that are recognised. Collective."""
    return accuracy(state.model, data, world, device)


def asked_to_stop(file: Path | None) -> bool:
    """Tell whether the file is there, as rank 0 sees it. Collective."""
    answer = [file is not None and file.exists()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def run(args: argparse.Namespace, world: World, device: torch.device) -> None:
    """Train from the newest checkpoint to the last epoch."""
    if args.batch_size < world.size:
        raise SystemExit(
            f"--batch-size={args.batch_size} is smaller than the world ({world.size} workers): "
            "every worker needs a sample in each step"
        )
    torch.manual_seed(SEED)
    train_set, test_set = digits()
    train_set = TensorDataset(*train_set.tensors, torch.arange(len(train_set)))
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    state = State(model, optimizer)
    args.checkpoint_file.parent.mkdir(parents=True, exist_ok=True)
    load_checkpoint(state, args.checkpoint_file, world)
    report(world, f"world of {world.size}, fence {world.epoch}, from step {state.step}")

    parallel = DistributedDataParallel(model)
    stop = False
    while state.epoch < args.epochs and not stop:
        stretch = next_stretch(train_set, state, world, args.batch_size, args.checkpoint_every)
        train(stretch, parallel, state, device, args)
        if state.sample == len(train_set):
            state.best_acc1 = max(state.best_acc1, validate(state, test_set, world, device))
            state.epoch, state.sample = state.epoch + 1, 0
            stop = asked_to_stop(args.stop_file)
        if world.local_rank == 0:
            save_checkpoint(state, args.checkpoint_file, world)
    report(world, f"best test accuracy: {state.best_acc1:.1%}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training in the style of ImageNet's.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of the whole world")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument(
        "--checkpoint-file", type=Path, required=True, help="on a disk of each node's own"
    )
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--print-freq", type=int, default=20, metavar="STEPS")
    parser.add_argument(
        "--stop-file", type=Path, help="end with the epoch in which rank 0 finds this file"
    )
    parser.add_argument("--step-log", type=Path, help="append a JSON line for every step")
    parser.add_argument(
        "--min-step-seconds", type=float, default=0.0, help="let a step take at least this long"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = World.from_environment()
    device = enter_process_group(world)
    run(args, world, device)
    leave_process_group()


if __name__ == "__main__":
    main()
