"""Train a small network on handwritten digits, elastically, through torchrun.

    torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=10 --rdzv-id=digits \\
        --rdzv_backend=etcd3 --rdzv-endpoint=etcd-host:2379 \\
        examples/digits.py --checkpoint-dir=/var/tmp/digits

Start the same command on every node. Nodes may join, leave and die: torchrun then restarts the
workers in a new world, and they go on from the newest checkpoint any node has. Nodes need not share
a disk: each keeps its own checkpoint file, and the newest one is sent to all. At most the steps
since the last checkpoint (``--checkpoint-every``) are lost.

The data, 1,797 images of 8 x 8 pixels, lie beside this file: the test set of "Optical Recognition
of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998; UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49; CC BY 4.0). Works with any rendezvous backend; etcd3 adds the
fencing epoch that :func:`save_checkpoint` uses.
"""

from __future__ import annotations

import argparse
import csv
import gc
import gzip
import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see leave_process_group()
from torch import Tensor, nn
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

DATA = Path(__file__).with_name("digits.csv.gz")
"""A line for each image: the pixels, from 0 to 16, and the digit."""
SEED = 7
TEST_SIZE = 357  # leaves 1,440 to train on: 24 batches of 60


@dataclass(frozen=True)
class World:
    """What torchrun tells a worker about the world it belongs to."""

    rank: int
    local_rank: int
    size: int
    restart_count: int
    epoch: int
    """Of the rendezvous, not of the training: grows with every world that etcd3 forms."""

    @classmethod
    def from_environment(cls) -> World:
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            restart_count=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            epoch=int(os.environ.get("RDZV_ETCD_EPOCH", "0")),
        )


@dataclass
class Progress:
    """How far the training is. It counts samples, so it means the same in a world of any size."""

    step: int = 0
    pass_number: int = 0
    """How many times all training data have been seen."""
    sample: int = 0
    """Position in the current pass."""


class StaleWorldError(RuntimeError):
    """A newer world has written a checkpoint: this worker's world is over."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split the same way in every process."""
    with gzip.open(DATA, "rt", newline="") as file:
        table = torch.tensor([[int(value) for value in line] for line in csv.reader(file)])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(SEED))]
    x, y = table[:, :-1].view(-1, 1, 8, 8).float() / 16, table[:, -1]
    train, test = slice(TEST_SIZE, None), slice(None, TEST_SIZE)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


# --- checkpoints --------------------------------------------------------------------------------


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, world: World
) -> None:
    """Replace the node's checkpoint; a reader sees the old one or the new one, never a part.

    The world's epoch is stored with it as a fencing token: a worker of an old world that was cut
    off and comes back late must not overwrite what a newer world has learned since. Raises
    :class:`StaleWorldError` then.
    """
    if path.exists():
        newest = torch.load(path, map_location="cpu", weights_only=True)["epoch"]
        if newest > world.epoch:
            raise StaleWorldError(
                f"{path} was written in epoch {newest}, this world's epoch is {world.epoch}: "
                "either this world is over, or etcd is a new one; then use another --checkpoint-dir"
            )
    state = {
        "epoch": world.epoch,
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(
    path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Progress:
    """Load the newest checkpoint of all nodes into every rank and return where it stands.

    Collective: every rank calls it. Each reads its own node's file if there is one; the rank with
    the most progress broadcasts its bytes, so nodes share no disk. Without any checkpoint the
    training starts from the beginning.
    """
    content = path.read_bytes() if path is not None and path.exists() else b""
    step = _unpack(content)["progress"]["step"] if content else -1
    mine = torch.tensor([step, len(content)], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    steps, sizes = torch.stack(everyone).T.tolist()
    newest = max(range(len(steps)), key=steps.__getitem__)
    if steps[newest] < 0:
        return Progress()

    if newest == dist.get_rank():
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    else:
        buffer = torch.empty(sizes[newest], dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=newest)
    state = _unpack(bytes(buffer.cpu().numpy()))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def _unpack(content: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


# --- training -----------------------------------------------------------------------------------


def batches_until_next_checkpoint(
    data: TensorDataset, progress: Progress, world: World, args: argparse.Namespace
) -> tuple[DataLoader[Any], int]:
    """Return this rank's batches of the next stretch, and where in the pass the stretch ends.

    Every pass goes through the data in an order of its own, the same on all ranks. A stretch is
    the part of it up to the next checkpoint, divided among the ranks by the sampler: whatever the
    worlds' sizes, a pass sees every sample (a few twice, where a stretch does not divide evenly).
    """
    generator = torch.Generator().manual_seed(SEED + progress.pass_number)
    order = torch.randperm(len(data), generator=generator).tolist()
    end = min(len(data), progress.sample + args.checkpoint_every * args.batch_size)
    stretch = Subset(data, order[:end])
    sampler = ElasticDistributedSampler(
        stretch, num_replicas=world.size, rank=world.rank, start_index=progress.sample
    )
    # The batch of the whole world stays the same, so that the learning rate need not change.
    per_rank = max(1, args.batch_size // world.size)
    return DataLoader(stretch, batch_size=per_rank, sampler=sampler), end


@contextmanager
def lasting_at_least(seconds: float) -> Iterator[None]:
    """Stretch what is done inside to ``seconds``, to play a training of longer steps."""
    started = time.monotonic()
    yield
    if (left := started + seconds - time.monotonic()) > 0:
        time.sleep(left)


def train(args: argparse.Namespace, world: World, device: torch.device) -> float:
    """Train to the end and return the accuracy on the test set."""
    torch.manual_seed(SEED)
    train_set, test_set = digits()
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    checkpoint: Path | None = None
    if args.checkpoint_dir is not None:
        args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = args.checkpoint_dir / "digits.pt"
    progress = load_checkpoint(checkpoint, model, optimizer, device)
    resumed_from = progress.step
    report(world, f"world of {world.size}, epoch {world.epoch}, from step {resumed_from}")

    parallel = DistributedDataParallel(model)
    while progress.pass_number < args.passes:
        batches, end = batches_until_next_checkpoint(train_set, progress, world, args)
        for images, labels in batches:
            with lasting_at_least(args.min_step_seconds):
                loss = nn.functional.cross_entropy(parallel(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            progress.step += 1
            log_step(args.step_log, world, progress.step, resumed_from)
            if progress.step % args.print_every == 0:
                report(world, f"step {progress.step}  loss {loss.item():.3f}")
        progress.sample = end
        if end == len(train_set):
            progress.pass_number, progress.sample = progress.pass_number + 1, 0
        if checkpoint is not None and world.local_rank == 0:
            save_checkpoint(checkpoint, model, optimizer, progress, world)
    return accuracy(model, test_set, world, device)


@torch.no_grad()
def accuracy(
    model: nn.Module, test_set: TensorDataset, world: World, device: torch.device
) -> float:
    """Return the share of test images recognised; every rank looks at its part of them."""
    images, labels = (part[world.rank :: world.size].to(device) for part in test_set.tensors)
    right: Tensor = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(test_set)


def report(world: World, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)


def log_step(path: Path | None, world: World, step: int, resumed_from: int, **more: object) -> None:
    """Append a JSON line; one short write to a file opened for appending is not torn."""
    if path is None:
        return
    line = {
        "time": time.time(),
        "pid": os.getpid(),
        "rank": world.rank,
        "world_size": world.size,
        "restart_count": world.restart_count,
        "epoch": world.epoch,
        "step": step,
        "resumed_from": resumed_from,
        **more,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def enter_process_group(world: World) -> torch.device:
    """Wait for all workers; return where this one computes, a GPU of its own if there are any."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def leave_process_group() -> None:
    """End together, with no thread of gloo's left: one that has a tensor to give back needs the
    interpreter, and aborts a process that is just ending (seen with torch 2.13). These threads end
    with the last reference to their process group, which has to be torch.distributed's own here:
    DistributedDataParallel keeps one until the garbage is collected. Default arguments in
    ``torch.distributed.nn.functional``, which optimizers import, would keep one for good, had that
    not been imported before there was a group."""
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training on handwritten digits.")
    parser.add_argument("--passes", type=int, default=12, help="over the training data")
    parser.add_argument("--batch-size", type=int, default=60, help="of the whole world")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="on each node; without it a restart starts over"
    )
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-log", type=Path, help="append a JSON line for every step")
    parser.add_argument(
        "--min-step-seconds", type=float, default=0.0, help="let a step take at least this long"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    world = World.from_environment()
    device = enter_process_group(world)
    share = train(args, world, device)
    report(world, f"test accuracy: {share:.1%}")
    leave_process_group()


if __name__ == "__main__":
    main()
