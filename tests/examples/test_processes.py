"""The examples that need no framework: what they promise happens, with real processes."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.world_change import PROCESS_EXITED
from tests.examples.programs import LAUNCHERS, ROOT, Program, Programs
from tests.library.nodes import wait_until
from tests.support.python_path import python_path
from tests.support.servers import EtcdServer

FAILS = """
import sys, rdzv_etcd, workers
workers.OTHERS_TO_BLAME_S = 0.5

def work(place):
    sys.exit(7 if place.rank == 1 else 0)

if __name__ == "__main__":
    with rdzv_etcd.connect(sys.argv[1], job=sys.argv[2], nodes=2) as group:
        workers.launch(group, work)
"""
LOOPBACK = ("--host", "127.0.0.1")


def replicas(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/replicas", timeout=30) as answer:
        known: list[str] = json.load(answer)
    return known


def asked(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def links(one: Program, other: Program) -> int:
    """How many connections these two hold to each other."""
    here, there = (psutil.Process(it.process.pid).net_connections("tcp") for it in (one, other))
    established = psutil.CONN_ESTABLISHED
    ends = {(it.laddr, it.raddr) for it in here if it.status == established}
    return sum((it.raddr, it.laddr) in ends for it in there if it.status == established)


def test_a_dead_replica_is_out_of_the_routing_long_before_its_lease_has_run_out(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    started = [
        programs.start("inference_replicas.py", etcd_server.endpoint, job_id, *LOOPBACK)
        for _ in range(2)
    ]
    urls = [program.wait_for(r"serving at (\S+)")[1] for program in started]
    for program in started:
        program.wait_for("^2 replicas")
    assert [replicas(url) for url in urls] == [sorted(urls)] * 2

    # Not before: in a world's first moments a death is noticed by its lease.
    wait_until("both watch each other", lambda: links(*started) == 2)
    assert {asked(urls[0]) for _ in range(2)} == {f"inferred by {url}" for url in urls}

    programs.kill(started[0])
    killed_at = time.monotonic()
    assert asked(urls[1]) == f"inferred by {urls[1]}"  # at once, whomever it asks first
    why = started[1].wait_for("^over: (.*)")[1]
    print(f"noticed after {time.monotonic() - killed_at:.2f} s")
    assert PROCESS_EXITED in why  # and not: lease expired
    wait_until("it is dropped", lambda: replicas(urls[1]) == [urls[1]])
    started[1].wait_for("^1 replicas")


def test_a_replica_that_is_stopped_says_so(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    one, other = (
        programs.start("inference_replicas.py", etcd_server.endpoint, job_id, *LOOPBACK)
        for _ in range(2)
    )
    for program in (one, other):
        program.wait_for("^2 replicas")
    one.process.terminate()
    assert one.end() == 0
    assert "left" in other.wait_for("^over: (.*)")[1]
    other.wait_for("^1 replicas")


def test_the_rank_of_a_slurm_task_is_its_number(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    """Four tasks on two nodes, the last one started first."""
    tasks = [
        programs.start(
            "srun_tasks.py",
            etcd_server.endpoint,
            "--local-addr=127.0.0.1",
            SLURM_JOB_ID=job_id,
            SLURM_STEP_ID="0",
            SLURM_NTASKS="4",
            SLURM_PROCID=str(task),
            SLURM_NODEID=str(task // 2),
        )
        for task in (3, 2, 1, 0)
    ]
    seen = {program.wait_for("^task (.*)")[1] for program in tasks}
    (master,) = {line.rpartition(" ")[2] for line in seen}
    assert seen == {
        f"{task}: rank {task} of 4, local rank {task % 2} of 2 on node {task // 2}, master {master}"
        for task in range(4)
    }
    assert [program.end() for program in tasks] == [0, 0, 0, 0]


@pytest.mark.slow
def test_healthy_replica_groups_go_on_without_a_lost_one_and_take_it_back(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    """No step is lost or done twice, and all have the same model in the end."""

    def group(name: str) -> list[str]:
        return [etcd_server.endpoint, job_id, "--name", name, "--groups=1:2", "--steps=300"]

    steady, victim = (programs.start("replica_groups.py", *group(name)) for name in ("a", "b"))
    steady.wait_for("^step .*: 2 groups")
    victim.wait_for("^step .*: 2 groups")
    programs.kill(victim)
    alone = steady.wait_for(r"^step (\d+): 1 groups")
    late = programs.start("replica_groups.py", *group("b"))
    assert "a" in late.wait_for("^quorum: (.*)")[1]
    joined_at = int(late.wait_for(r"^step (\d+): 2 groups")[1])
    assert joined_at > int(alone[1])  # it got the others' model, and did not begin anew

    assert steady.end() == late.end() == 0
    steps = [int(found[1]) for line in steady.lines if (found := re.match(r"step (\d+)", line))]
    assert steps == list(range(1, 301))
    assert steady.lines[-1] == late.lines[-1]
    assert steady.lines[-1].startswith("ended at step 300 with 10.0")


@pytest.mark.slow
def test_a_killed_launcher_s_workers_end_and_the_others_go_on(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    command = ("multiprocessing_workers.py", etcd_server.endpoint, job_id)
    started = [
        programs.start(*command, "--nodes=1:2", "--workers=1", "--steps=30") for _ in range(2)
    ]
    for program in started:
        program.wait_for("^step 3: 2 workers")
    victim, survivor = started
    programs.kill(victim)
    victim.end()  # its worker has ended, too: it would hold the pipe
    survivor.wait_for("^world 1 is over: lost ")
    survivor.wait_for("^step 30: 1 workers")
    assert survivor.end() == 0


@pytest.mark.slow
def test_torch_s_elastic_launch_takes_the_backend_by_its_name(
    etcd_server: EtcdServer, job_id: str, programs: Programs
) -> None:
    """As in launchers made from torchrun: ``LaunchConfig(rdzv_backend="etcd3")``."""
    command = ("elastic_launch.py", etcd_server.endpoint, job_id, "--nodes=2", "--workers=1")
    started = [programs.start(*command) for _ in range(2)]
    assert [program.end() for program in started] == [0, 0]
    lines = {line for program in started for line in program.lines if "returned" in line}
    assert lines == {"rank 0 returned 3", "rank 1 returned 3"}
    epochs = {line.rpartition(" ")[2] for it in started for line in it.lines if "epoch" in line}
    assert len(epochs) == 1
    assert int(epochs.pop()) > 0


def test_a_worker_that_fails_by_itself_ends_the_job(
    etcd_server: EtcdServer, job_id: str, programs: Programs, tmp_path: Path
) -> None:
    """And the other nodes get the reason."""
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    environment = {"PYTHONPATH": python_path(ROOT, LAUNCHERS)}
    started = [
        programs.run(sys.executable, program, etcd_server.endpoint, job_id, **environment)
        for _ in range(2)
    ]
    assert [it.end() for it in started] == [1, 1]
    for it in started:
        assert "JobClosedError" in it.lines[-1]
        assert "a worker failed" in it.lines[-1]
