"""The training of ``rdzv-etcd demo``: a small network on made-up images, with torch alone.

    torchrun --rdzv-backend=etcd3 … -m rdzv_etcd.cli.demo_training --folder=/var/tmp/demo

Each worker prints ``MARK`` and a JSON object for every step. The training ends, on all workers at
the same step, once the file ``finish`` is in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

MARK = "rdzv-etcd-demo "
_KINDS, _PIXELS, _IMAGES, _BATCH, _NOISE = 10, 64, 2000, 120, 0.3
_LEARNING_RATE = 0.05
_CHECKPOINT_EVERY = 10
_STEP_S = 0.05
"""A step takes at least this long, like those of larger models."""


def images(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Make images of ten kinds: each kind has a pattern, and some pixels of an image are random."""
    patterns = torch.rand(_KINDS, _PIXELS, generator=torch.Generator().manual_seed(7)).round()
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(_KINDS, (count,), generator=random)
    noise = torch.rand(count, _PIXELS, generator=random)
    flipped = torch.rand(count, _PIXELS, generator=random) < _NOISE
    return torch.where(flipped, noise, patterns[kinds]), kinds


def train(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(_PIXELS, 32), nn.ReLU(), nn.Linear(32, _KINDS))
    step = resumed = load(folder, model)
    x, y = images(1, _IMAGES)
    test_x, test_y = images(2, 500)
    is_last = False
    while not is_last:
        began_s = time.monotonic()
        batch = torch.randperm(_IMAGES, generator=torch.Generator().manual_seed(step))[:_BATCH]
        mine = batch[rank::size]
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        model.zero_grad()
        torch.autograd.backward(loss)
        is_last = average(model, (folder / "finish").exists())
        descend(model)
        step += 1
        if rank == 0 and (is_last or step % _CHECKPOINT_EVERY == 0):
            save(folder, model, step)
        time.sleep(max(0.0, began_s + _STEP_S - time.monotonic()))
        with torch.no_grad():
            right = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
        report({"rank": rank, "size": size, "step": step, "resumed": resumed}, loss.item(), right)
    dist.barrier()


def average(model: nn.Module, wants_end: bool) -> bool:
    """Average the gradients over all workers; return whether one of them wants to end."""
    wish = torch.tensor(float(wants_end))
    dist.all_reduce(wish)
    for each in model.parameters():
        if each.grad is not None:
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
    return bool(wish > 0)


def descend(model: nn.Module) -> None:
    """Step down the gradient, without ``torch.optim``: that loads torch's compiler first, which
    takes as long as the rest of torch."""
    with torch.no_grad():
        for each in model.parameters():
            if each.grad is not None:
                each.sub_(each.grad, alpha=_LEARNING_RATE)


def save(folder: Path, model: nn.Module, step: int) -> None:
    """Replace the checkpoint: a reader sees the old one or the new one."""
    unfinished = folder / f"checkpoint.{os.getpid()}"
    torch.save({"step": step, "model": model.state_dict()}, unfinished)
    unfinished.replace(folder / "checkpoint")


def load(folder: Path, model: nn.Module) -> int:
    """Load the checkpoint, if there is one, and return its step; the same on all ranks."""
    found = [None]
    path = folder / "checkpoint"
    if dist.get_rank() == 0 and path.exists():
        found = [torch.load(path, weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    state = found[0]
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    return int(state["step"])


def report(place: dict[str, int], loss: float, right: float) -> None:
    epoch = int(os.environ.get("RDZV_ETCD_EPOCH", "0"))
    line = {**place, "wall_s": time.time(), "epoch": epoch, "loss": loss, "accuracy": right}
    sys.stdout.write(f"{MARK}{json.dumps(line)}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
