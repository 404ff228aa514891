"""examples/elastic/imagenet_style.py alone: how an epoch is divided, and what is kept on disk."""

from __future__ import annotations

import dataclasses
import os
import random
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from tests.in_process.processes import LIMIT_S, context, die_with_parent
from tests.torchrun.scenes import EXAMPLES

SCRIPT = EXAMPLES / "elastic" / "imagenet_style.py"
Place: TypeAlias = tuple[int, int] | None
"""A checkpoint's step and fence."""


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def world_of(example: SimpleNamespace, size: int, rank: int = 0, epoch: int = 1) -> Any:
    return example.World(rank=rank, local_rank=0, size=size, restart_count=0, epoch=epoch)


@pytest.mark.parametrize("seed", range(10))
def test_each_sample_is_used_once_whatever_the_worlds_are(
    example: SimpleNamespace, seed: int
) -> None:
    """The world's size is another one after every checkpoint; a step has as many batches as ranks,
    and the number by which they divide their gradients is that of the samples in it."""
    chance = random.Random(seed)
    batch_size, checkpoint_every = chance.randint(8, 70), chance.randint(1, 7)
    numbers = torch.arange(chance.randint(batch_size, 1500))
    data = TensorDataset(numbers, numbers, numbers)
    state = SimpleNamespace(epoch=seed, sample=0)
    used: list[int] = []
    while state.sample < len(numbers):
        size = chance.randint(1, 8)
        stretches = [
            example.next_stretch(
                data, state, world_of(example, size, rank), batch_size, checkpoint_every
            )
            for rank in range(size)
        ]
        for step in zip(*(stretch.batches() for stretch in stretches), strict=True):
            assert {batch.total for batch in step} == {sum(batch.count for batch in step)}
            assert all(len(batch.images) for batch in step)
            used += [n for batch in step for n in batch.numbers[: batch.count].tolist()]
        (state.sample,) = {stretch.end for stretch in stretches}
        assert len(used) == state.sample
    assert sorted(used) == numbers.tolist()


@pytest.fixture
def state(example: SimpleNamespace) -> Any:
    model = example.network()
    return example.State(model, torch.optim.SGD(model.parameters(), 0.1))


def test_an_older_world_cannot_overwrite_a_newer_checkpoint(
    example: SimpleNamespace, state: Any, tmp_path: Path
) -> None:
    path = tmp_path / "digits.pt"
    newer = world_of(example, 2, epoch=20)
    example.save_checkpoint(state, path, dataclasses.replace(newer, epoch=10))
    example.save_checkpoint(state, path, newer)
    kept = path.read_bytes()
    with pytest.raises(example.StaleWorldError, match="RDZV_ETCD_EPOCH=20"):
        example.save_checkpoint(state, path, dataclasses.replace(newer, epoch=10))
    assert path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_newest_checkpoint_of_two_nodes_is_on_both_afterwards(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    cases: list[tuple[Path, tuple[Place, Place], int]] = [
        (tmp_path / "most-steps", ((30, 5), (28, 9)), 0),
        (tmp_path / "of-as-many-the-newer-world-s", ((28, 5), (28, 9)), 1),
        (tmp_path / "new-node", (None, (28, 9)), 1),
        (tmp_path / "none", (None, None), 0),
    ]
    expected = []
    for folder, places, wins in cases:
        for rank, place in enumerate(places):
            path = folder / str(rank) / "digits.pt"
            path.parent.mkdir(parents=True)
            path.with_name("digits.pt.4711.tmp").write_bytes(b"half a check")
            if place is not None:
                model = example.network()
                state = example.State(model, torch.optim.SGD(model.parameters(), 0.1))
                state.step, fence = place
                example.save_checkpoint(state, path, world_of(example, 1, epoch=fence))
        winner = folder / str(wins) / "digits.pt"
        expected.append(winner.read_bytes() if winner.exists() else None)
    folders = [folder for folder, *_ in cases]
    nodes = [context.Process(target=_load, args=(rank, tmp_path, folders)) for rank in (0, 1)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(LIMIT_S)
        node.kill()
        assert node.exitcode == 0
    for folder, content in zip(folders, expected, strict=True):
        for rank in (0, 1):
            files = list((folder / str(rank)).iterdir())
            assert [file.read_bytes() for file in files] == ([content] if content else [])


def _load(rank: int, meeting: Path, folders: list[Path]) -> None:
    """Be one node of a world of two, and see that what it has loaded is what it keeps."""
    die_with_parent()
    example = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    dist.init_process_group("gloo", f"file://{meeting}/group", rank=rank, world_size=2)
    for folder in folders:
        model = example.network()
        state = example.State(model, torch.optim.SGD(model.parameters(), 0.1))
        path = folder / str(rank) / "digits.pt"
        example.load_checkpoint(state, path, world_of(example, 2, rank, epoch=10))
        if path.exists():
            kept = torch.load(path, weights_only=True)
            assert (state.step, state.resumed_from) == (
                kept["step"],
                (kept["step"], kept["fence"]),
            )
            weights = kept["model"]
            assert all(torch.equal(weights[key], v) for key, v in model.state_dict().items())
        else:
            assert state.step == 0
    dist.barrier()
    os._exit(0)  # torch's own threads may abort a process that ends
