"""The commands of docs/guide.md, with what happens to people who give them."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import run as torchrun

from tests.deploy.document import commands
from tests.support.processes import free_port
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agent, Agents, Step
from tests.torchrun.in_etcd import finish
from tests.torchrun.scenes import (
    DOCUMENT,
    EXAMPLES,
    DocumentedJob,
    assert_nothing_lost,
    checkpoint,
    restarts_used,
    sizes_seen,
)

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
    ours, _, _ = commands(block, DOCUMENT).partition("examples/")
    words = theirs.replace("c10d", "etcd3").split()
    assert ours.replace("\\\n", "").split() == words


def start(agents: Agents, job: DocumentedJob, *names: str, **environment: str) -> list[Agent]:
    """Start nodes as the document says, with this Python's torchrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PET_RDZV_CONF": SOON, **job.variables, **environment, "PATH": path}
    return agents.start(job, *names, **variables)


def node_of(step: Step, nodes: Sequence[Agent]) -> Agent:
    return next(agent for agent in nodes if agent.name == step.agent)


@pytest.mark.release
def test_fault_tolerant(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """A worker fails: all start again, one restart is used up, no sample is lost or seen twice."""
    job = DocumentedJob(etcd.target, tmp_path, block="fault-tolerant", nproc=2)
    first, second = start(agents, job, "a", "b", NUM_NODES="2")
    agents.wait_for_world([first, second], size=4, steps=7)
    failed_at = time.time()
    psutil.Process(second.steps()[-1].pid).kill()
    world = agents.wait_for_world([first, second], size=4, after=failed_at)
    print(f"trained again {world[0].time - failed_at:.1f} s after a worker was killed")
    finish(agents, etcd, job, [first, second])
    assert_nothing_lost([first, second])
    assert second.steps()[-1].restart_count == 1
    assert restarts_used([first, second]) == 1


@pytest.mark.release
def test_elastic(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """Two nodes come later: none of the three restarts is used up."""
    job = DocumentedJob(etcd.target, tmp_path, block="elastic")
    first = start(agents, job, "a")
    agents.wait_for_world(first, size=1, steps=7)
    came_at = time.time()
    everybody = [*first, *start(agents, job, "b", "c")]
    world = agents.wait_for_world(everybody, size=3, after=came_at, steps=7)
    print(f"three trained {world[0].time - came_at:.1f} s after two were started")
    finish(agents, etcd, job, everybody)
    assert_nothing_lost(everybody)
    sizes = sizes_seen(everybody)
    assert (sizes[0], sizes[-1]) == (1, 3)
    assert restarts_used(everybody) == 0
    assert len({checkpoint(job, agent).read_bytes() for agent in everybody}) == 1


@pytest.mark.release
def test_an_over_quota_pool(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """Four nodes, two are taken with SIGTERM, rank 0 stays where it is; then there are four again.
    No restart is used up, and the nodes that are taken end with 0."""
    job = DocumentedJob(etcd.target, tmp_path, block="elastic")
    job.replaced = (
        ("torchrun", f"{EXAMPLES}/elastic/preemptible.sh torchrun"),
        ("--nnodes=1:4", "--nnodes=2:4"),
    )
    pool = start(agents, job, "a", "b", "c", "d", PET_RDZV_CONF=ALL_COME)
    world = agents.wait_for_world(pool, size=4, steps=7)
    master, *others = (node_of(step, pool) for step in world)
    taken, stay = others[:2], [master, others[2]]
    noticed_at = time.time()
    for agent in taken:
        agent.terminate()
    assert [agent.wait() for agent in taken] == [0, 0]
    print(f"ended {time.time() - noticed_at:.1f} s after the notice")
    world = agents.wait_for_world(stay, size=2, after=noticed_at, steps=7)
    print(f"two trained {world[0].time - noticed_at:.1f} s after the notice")
    assert world[0].agent == master.name

    back_at = time.time()
    back = start(agents, job, "e", "f")
    world = agents.wait_for_world([*stay, *back], size=4, after=back_at, steps=7)
    print(f"four trained {world[0].time - back_at:.1f} s after two were started")
    assert world[0].agent == master.name
    finish(agents, etcd, job, [*stay, *back])
    everybody = [*pool, *back]
    assert_nothing_lost(everybody)
    assert restarts_used(everybody) == 0
    sizes = sizes_seen(everybody)
    assert (sizes[0], min(sizes), sizes[-1]) == (4, 2, 4)


@pytest.mark.release
def test_spot_nodes(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """Rank 0's node is gone without notice, and another comes in its place. Then the one that was
    there from the beginning gets a SIGTERM of which nobody makes a drain: its exit code tells, and
    the newcomer, whose disk was empty, goes on with what it was sent."""
    job = DocumentedJob(etcd.target, tmp_path, block="elastic")
    job.replaced = (("--nnodes=1:4", "--nnodes=1:3"), ("--max-restarts=3", "--max-restarts=100"))
    nodes = start(agents, job, "a", "b")
    world = agents.wait_for_world(nodes, size=2, steps=7)
    killed, stays = (node_of(step, nodes) for step in world)
    killed_at = time.time()
    killed.kill()
    world = agents.wait_for_world([stays], size=1, after=killed_at)
    print(f"the other trained {world[0].time - killed_at:.1f} s after the kill")

    came_at = time.time()
    (newcomer,) = start(agents, job, "c")
    agents.wait_for_world([stays, newcomer], size=2, after=came_at, steps=7)
    noticed_at = time.time()
    stays.terminate()
    assert stays.wait() not in (0, -signal.SIGKILL)
    world = agents.wait_for_world([newcomer], size=1, after=noticed_at)
    print(f"the other trained {world[0].time - noticed_at:.1f} s after the SIGTERM")

    finish(agents, etcd, job, [newcomer])
    everybody = [*nodes, newcomer]
    assert_nothing_lost(everybody)
    used = restarts_used(everybody)
    print(f"{used} restarts used up")
    assert used <= 2


@pytest.mark.release
def test_pet_variables_only(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """What operators set besides does no harm; ranks follow the pods' numbers."""
    job = DocumentedJob(etcd.target, tmp_path, block="pet")
    job.replaced = (
        ("etcd-host:2379", etcd.target),
        ("my-job", job.run_id),
        ("last_call_timeout=20", SOON),
    )
    pods = []
    for number in (1, 0):
        pods += start(
            agents,
            job,
            f"pod-{number}",
            PET_NODE_RANK=str(number),
            PET_MASTER_ADDR="digits-node-0-0.digits",
            PET_MASTER_PORT="29400",
            MASTER_ADDR="digits-master-0",
            MASTER_PORT="23456",
            RANK=str(number),
            WORLD_SIZE="2",
        )
    world = agents.wait_for_world(pods, size=2)
    assert [step.agent for step in world] == ["pod-0", "pod-1"]
    finish(agents, etcd, job, pods)
    assert_nothing_lost(pods)


def one_machine(tmp_path: Path, block: str) -> DocumentedJob:
    """A job on an etcd of its own; it ends by itself."""
    port = free_port()
    job = DocumentedJob(f"localhost:{port}", tmp_path, block=block, script_args=("--epochs=2",))
    job.replaced = (("localhost:2379", job.endpoint), ("embed=1", f"embed=1,embed_grace=2,{QUICK}"))
    return job


@pytest.mark.slow
def test_several_agents_on_one_machine(agents: Agents, tmp_path: Path) -> None:
    """They make one world and end; the shell's exit code would not tell."""
    job = one_machine(tmp_path, "one-machine")
    (shell,) = start(agents, job, "all")
    shell.wait()
    assert shell.output.count("best test accuracy") == 1
    assert_nothing_lost([shell])
    assert sizes_seen([shell]) == [2]
    kept = {(tmp_path / f"all-{agent}.pt").read_bytes() for agent in range(2)}
    (last,) = (torch.load(io.BytesIO(content), weights_only=True) for content in kept)
    assert last["epoch"] == 2


@pytest.mark.release
def test_stacked_jobs_on_one_machine(agents: Agents, tmp_path: Path) -> None:
    """Two jobs share an etcd that one of them has started; neither sees the other."""
    first = one_machine(tmp_path, "stacked")
    second = one_machine(tmp_path, "stacked")
    second.replaced, second.endpoint = first.replaced, first.endpoint
    started = [*start(agents, first, "first"), *start(agents, second, "second")]
    assert [agent.wait() for agent in started] == [0, 0]
    for agent in started:
        assert sizes_seen([agent]) == [1]
        assert_nothing_lost([agent])


def test_a_free_port_is_refused_with_what_to_write(agents: Agents, tmp_path: Path) -> None:
    """Torch's own command for stacked jobs, with nothing but the backend's name changed."""
    job = one_machine(tmp_path, "stacked")
    job.replaced = (("localhost:2379", "localhost:0"),)
    (agent,) = start(agents, job, "refused")
    assert agent.wait() != 0
    last = agent.output.rstrip().rpartition("\n")[2]
    assert re.search("write localhost:2379, with --rdzv-conf=embed=1", last), last
