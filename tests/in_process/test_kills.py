"""Members are killed and added at random, and the training goes on in the processes that are left.

That every sample is used once per pass is checked by the example itself, of what all members say
that they have used: a process in which it was not so would end with an error.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest

from tests.in_process.processes import Job, running_job
from tests.support.servers import EtcdServer

MOST = 5


@pytest.mark.slow
def test_training_goes_on_through_kills_and_additions(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    train_through(10, etcd_server, job_id, tmp_path, seed=1)


@pytest.mark.release
def test_training_goes_on_through_two_hundred_of_them(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    train_through(200, etcd_server, job_id, tmp_path, seed=2)


def train_through(
    events: int, etcd_server: EtcdServer, job_id: str, tmp_path: Path, *, seed: int
) -> None:
    """No step is lost but the one under way, the parameters of all members are the same after every
    step, and no process ends but those that are killed."""
    print(f"seed {seed}, {events} events")
    choice = random.Random(seed)
    with running_job(
        tmp_path,
        f"--etcd={etcd_server.endpoint}",
        f"--job={job_id}",
        f"--nodes=2:{MOST}",
        "--passes=1000000",
        "--last-call=0.5",
        "--lease-ttl=3",
        "--min-step-seconds=0.03",
    ) as job:
        for _ in range(3):
            job.add()
        job.await_steps(0.0, size=3)
        kills = 0
        for _ in range(events):
            kills += happen(job, choice)
        job.await_(
            "three passes over the samples",
            lambda: all(
                member.last is not None and member.last["passes"] >= 3 for member in job.alive
            ),
        )
        job.await_steps(time.monotonic())
        assert len(job.alive) == len(job.members) - kills
        assert kills > events / 4
    check(job)


def happen(job: Job, choice: random.Random) -> int:
    """Kill a member or add one; tell how many were killed. As a rule, wait for what follows."""
    time.sleep(choice.uniform(0.0, 0.6))  # it is the moment that shall be random
    trained = [member for member in job.alive if member.last is not None]
    kill = len(trained) > 2 and (len(job.alive) == MOST or choice.random() < 0.5)
    if kill:
        moment_s = choice.choice(job.alive if len(trained) > 3 else trained).kill()
    else:
        if len(job.alive) == MOST:
            job.await_steps(time.monotonic())
            return 0
        moment_s = time.monotonic()
        job.add()
    if choice.random() < (0.7 if kill else 0.3):
        job.await_steps(moment_s)
    return int(kill)


def check(job: Job) -> None:
    """What all members' logs together say."""
    lines = []
    for member in job.members:
        steps = [line["step"] for line in member.steps]
        assert all(later > earlier for earlier, later in itertools.pairwise(steps)), member.name
        lines += member.steps
    lines.sort(key=lambda line: line["time"])
    farthest, passes = 0, 0
    for line in lines:
        # The one that made the step alone may have been killed; then it is made once more.
        assert farthest <= line["step"] <= farthest + 1, line
        assert line["passes"] >= passes
        assert line["passes"] < 3 or line["loss"] < 1.5, line
        farthest, passes = line["step"], line["passes"]
    assert passes >= 3
    parameters: dict[tuple[int, int], set[str]] = {}
    for line in lines:
        parameters.setdefault((line["epoch"], line["step"]), set()).add(line["parameters"])
    assert all(len(digests) == 1 for digests in parameters.values())
    worlds = {line["epoch"] for line in lines}
    print(f"{farthest} steps, {passes} passes, {len(worlds)} worlds, last loss {lines[-1]['loss']}")
