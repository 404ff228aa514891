"""The digits example: keeps what it has learned through losses and arrivals, and fences."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.servers import EtcdServer
from tests.torchrun.agents import DIGITS, Agents, Job
from tests.torchrun.in_etcd import assert_nothing_left

CHECKPOINT_EVERY = 5


@pytest.mark.torchrun
@pytest.mark.release
def test_training_goes_on_through_a_loss_and_an_arrival(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Rank 0's node is killed, later a node without any checkpoint comes: at most one checkpoint
    interval is lost each time, and the accuracy is reached."""
    job = Job(etcd.target, tmp_path, nnodes="1:2", script=DIGITS)
    job.script_args = (
        "--passes=12",  # 288 steps
        f"--checkpoint-every={CHECKPOINT_EVERY}",
        "--min-step-seconds=0.12",  # the arrival has to fall into the training
    )
    started = agents.start(job, "a", "b")
    both = agents.wait_for_world(started, size=2, steps=2 * CHECKPOINT_EVERY)
    assert both[0].resumed_from == 0

    victim = next(agent for agent in started if agent.name == both[0].agent)
    killed_at = time.time()
    victim.kill()
    reached = max(step.step for agent in started for step in agent.steps())
    others = [agent for agent in started if agent is not victim]
    alone = agents.wait_for_world(others, size=1, steps=CHECKPOINT_EVERY, after=killed_at)
    assert reached - CHECKPOINT_EVERY <= alone[0].resumed_from <= reached

    (late,) = agents.start(job, "late")
    finishing = [*others, late]
    last = agents.wait_for_world(finishing, size=2, after=alone[0].time)
    reached = max(
        step.step for agent in others for step in agent.steps() if step.epoch == alone[0].epoch
    )
    assert {step.resumed_from for step in last} == {last[0].resumed_from}
    assert reached - CHECKPOINT_EVERY <= last[0].resumed_from <= reached

    for agent in finishing:
        agent.may_end = True
    assert [agent.wait() for agent in finishing] == [0, 0]
    (accuracy,) = re.findall(
        r"test accuracy: ([\d.]+)%", "".join(agent.output for agent in finishing)
    )
    assert float(accuracy) > 95
    assert_nothing_left(etcd, job)


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
