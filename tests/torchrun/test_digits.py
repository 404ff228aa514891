"""examples/digits.py keeps what it has learned through losses and arrivals, and fences."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.torchrun.agents import DIGITS
from tests.torchrun.training import Training

CHECKPOINT_EVERY = 5


@pytest.mark.torchrun
@pytest.mark.release
def test_training_continues_through_a_loss_and_an_arrival(train: Callable[..., Training]) -> None:
    """Rank 0's node is killed, later a node without any checkpoint comes: at most one checkpoint
    interval is lost each time, and the accuracy is reached."""
    script_args = (
        "--passes=12",  # 288 steps
        f"--checkpoint-every={CHECKPOINT_EVERY}",
        "--min-step-seconds=0.12",  # the arrival has to fall into the training
    )
    job = train("1:2", script=DIGITS, script_args=script_args)
    started = job.start("a", "b")
    both = job.wait_for_world(steps=2 * CHECKPOINT_EVERY)
    assert both[0].resumed_from == 0

    next(agent for agent in started if agent.name == both[0].agent).kill()
    reached = max(step.step for agent in started for step in agent.steps())
    (stays,) = job.members
    alone = job.wait_for_world(steps=CHECKPOINT_EVERY)
    assert reached - CHECKPOINT_EVERY <= alone[0].resumed_from <= reached

    (late,) = job.start("late")
    last = job.wait_for_world()
    reached = max(step.step for step in stays.steps() if step.epoch == alone[0].epoch)
    assert {step.resumed_from for step in last} == {last[0].resumed_from}
    assert reached - CHECKPOINT_EVERY <= last[0].resumed_from <= reached

    stays.may_end = late.may_end = True
    assert [stays.wait(), late.wait()] == [0, 0]
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", stays.output + late.output)
    assert float(accuracy) > 95
    job.assert_nothing_left()


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_worker_of_an_older_world_cannot_overwrite_a_newer_checkpoint(
    digits: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "digits.pt"
    model = digits.network()
    optimizer = torch.optim.Adam(model.parameters())
    newer = digits.World(rank=0, local_rank=0, size=2, restart_count=1, epoch=20)
    older = dataclasses.replace(newer, epoch=10)
    digits.save_checkpoint(path, model, optimizer, digits.Progress(step=5), older)
    digits.save_checkpoint(path, model, optimizer, digits.Progress(step=7), newer)
    with pytest.raises(digits.StaleWorldError, match="epoch 20"):
        digits.save_checkpoint(path, model, optimizer, digits.Progress(step=9), older)
    assert torch.load(path, weights_only=True)["progress"]["step"] == 7
    assert [file.name for file in tmp_path.iterdir()] == ["digits.pt"]
