"""The commands of docs/guide.md, with what happens to people who give them."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from tests.support.processes import free_port
from tests.torchrun.agents import QUICK, Agent, Step
from tests.torchrun.scenes import (
    DOCUMENT,
    EXAMPLES,
    DocumentedJob,
    assert_nothing_lost,
    checkpoint,
    restarts_used,
    sizes_seen,
)
from tests.torchrun.training import Training

pytestmark = pytest.mark.torchrun

SOON = QUICK.replace("last_call_timeout=5", "last_call_timeout=2")
"""The first world does not wait for nodes that do not come."""
ALL_COME = QUICK.replace("last_call_timeout=5", "last_call_timeout=60")
"""The first world is of all nodes, however long the last one takes to start."""


@pytest.mark.parametrize(
    ("block", "section"),
    [("fault-tolerant", "Fault tolerant"), ("elastic", "Elastic")],
)
def test_the_quick_starts_are_torch_s_with_the_backend_s_name_changed(
    block: str, section: str
) -> None:
    _, _, rest = (torchrun.__doc__ or "").partition(f"\n{section} (")
    _, _, rest = rest.partition("::\n")
    theirs, script, _ = rest.partition("YOUR_TRAINING_SCRIPT.py")
    assert script
    ours, _, _ = DOCUMENT.commands(block).partition("examples/")
    words = theirs.replace("c10d", "etcd3").split()
    assert ours.replace("\\\n", "").split() == words


@pytest.fixture
def scene(train: Callable[..., Training]) -> Callable[..., Training]:
    """A factory of jobs by the name of their command's block in the document."""
    return partial(train, "", kind=DocumentedJob)


def start(training: Training, *names: str, **environment: str) -> list[Agent]:
    """Start nodes as the document says, with this Python's torchrun."""
    job = training.job
    assert isinstance(job, DocumentedJob)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PET_RDZV_CONF": SOON, **job.variables, **environment, "PATH": path}
    return training.start(*names, **variables)


def node_of(step: Step, nodes: Sequence[Agent]) -> Agent:
    return next(agent for agent in nodes if agent.name == step.agent)


@pytest.mark.release
def test_an_over_quota_pool(scene: Callable[..., Training]) -> None:
    """Four nodes, two are taken with SIGTERM, rank 0 stays where it is; then there are four again.
    No restart is used up, and the nodes that are taken end with 0."""
    replaced = (
        ("torchrun", f"{EXAMPLES}/elastic/preemptible.sh torchrun"),
        ("--nnodes=1:4", "--nnodes=2:4"),
    )
    job = scene(block="elastic", replaced=replaced)
    pool = start(job, "a", "b", "c", "d", PET_RDZV_CONF=ALL_COME)
    world = job.wait_for_world(steps=7)
    master, *taken, _ = (node_of(step, pool) for step in world)
    noticed_at = time.time()
    for agent in taken:
        agent.terminate()
    assert [agent.wait() for agent in taken] == [0, 0]
    print(f"ended {time.time() - noticed_at:.1f} s after the notice")
    world = job.wait_for_world(steps=7)
    print(f"two trained {world[0].time - noticed_at:.1f} s after the notice")
    assert world[0].agent == master.name

    back_at = time.time()
    start(job, "e", "f")
    world = job.wait_for_world(steps=7)
    print(f"four trained {world[0].time - back_at:.1f} s after two were started")
    assert world[0].agent == master.name
    members = job.members
    job.finish()
    assert_nothing_lost(job.agents)
    assert len({checkpoint(job.job, agent).read_bytes() for agent in members}) == 1
    assert restarts_used(job.agents) == 0
    sizes = sizes_seen(job.agents)
    assert (sizes[0], min(sizes), sizes[-1]) == (4, 2, 4)


@pytest.mark.release
def test_spot_nodes(scene: Callable[..., Training]) -> None:
    """Rank 0's node is gone without notice, and another comes in its place. Then the one that was
    there from the beginning gets a SIGTERM that nothing turns into a drain: its exit code shows it,
    and the newcomer, whose disk was empty, continues with what it was sent."""
    replaced = (("--nnodes=1:4", "--nnodes=1:3"), ("--max-restarts=3", "--max-restarts=100"))
    job = scene(block="elastic", replaced=replaced)
    nodes = start(job, "a", "b")
    killed, stays = (node_of(step, nodes) for step in job.wait_for_world(steps=7))
    killed_at = time.time()
    killed.kill()
    world = job.wait_for_world()
    print(f"the other trained {world[0].time - killed_at:.1f} s after the kill")

    start(job, "c")
    job.wait_for_world(steps=7)
    noticed_at = time.time()
    stays.terminate()
    assert stays.wait() not in (0, -signal.SIGKILL)
    world = job.wait_for_world()
    print(f"the other trained {world[0].time - noticed_at:.1f} s after the SIGTERM")

    job.finish()
    assert_nothing_lost(job.agents)
    used = restarts_used(job.agents)
    print(f"{used} restarts used up")
    assert used <= 2


@pytest.fixture
def one_machine(scene: Callable[..., Training]) -> Callable[..., Training]:
    """A factory of jobs on an etcd of their own, which ends by itself."""

    def make(block: str, endpoint: str = "") -> Training:
        endpoint = endpoint or f"localhost:{free_port()}"
        replaced = (("localhost:2379", endpoint), ("embed=1", f"embed=1,embed_grace=2,{QUICK}"))
        args = ("--epochs=2",)
        return scene(block=block, endpoint=endpoint, replaced=replaced, script_args=args)

    return make


@pytest.mark.release
def test_several_agents_on_one_machine(
    one_machine: Callable[..., Training], tmp_path: Path
) -> None:
    """They make one world and end; the shell's exit code would not show it."""
    (shell,) = start(one_machine("one-machine"), "all")
    shell.wait()
    assert shell.output.count("best test accuracy") == 1
    assert_nothing_lost([shell])
    assert sizes_seen([shell]) == [2]
    kept = {(tmp_path / f"all-{agent}.pt").read_bytes() for agent in range(2)}
    (last,) = (torch.load(io.BytesIO(content), weights_only=True) for content in kept)
    assert last["epoch"] == 2


@pytest.mark.release
def test_stacked_jobs_on_one_machine(one_machine: Callable[..., Training]) -> None:
    """Two jobs share an etcd that one of them has started; neither sees the other."""
    first = one_machine("stacked")
    second = one_machine("stacked", endpoint=first.job.endpoint)
    started = [*start(first, "first"), *start(second, "second")]
    assert [agent.wait() for agent in started] == [0, 0]
    for agent in started:
        assert sizes_seen([agent]) == [1]
        assert_nothing_lost([agent])


def test_a_free_port_is_refused_with_the_right_command(
    one_machine: Callable[..., Training],
) -> None:
    """Torch's own command for stacked jobs, with nothing but the backend's name changed."""
    job = one_machine("stacked", endpoint="localhost:0")
    (agent,) = start(job, "refused")
    assert agent.wait() != 0
    last = agent.output.rstrip().rpartition("\n")[2]
    assert re.search("write localhost:2379, with --rdzv-conf=embed=1", last), last
