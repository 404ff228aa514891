"""Frameworks and launchers on a group of their own, or under torchrun; each in its environment."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv_etcd.world_change import PROCESS_EXITED
from tests.examples.programs import LAUNCHERS, Program, Programs
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.release

FRAMEWORKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "accelerate": (("accelerate>=1.2,<2",),),
    "jax": (("jax>=0.4.36,<0.12",),),
    "lightning": (("lightning>=2.4,<3",),),
    "ray": (("ray>=2.9,<3",),),
    # By itself it wants urllib3 1.26, which only some of its schedulers need.
    "torchx": (
        ("--no-deps", "torchx>=0.7,<0.8"),
        ("pyre-extensions", "docstring-parser", "tabulate", "importlib-metadata"),
    ),
}
"""The arguments of pip for each, call by call: only what these tests need."""

SAME_WEIGHT = r"^rank (\d) of 2: (all have the same weight: True)"
LEARNT = r"^rank (\d) of 2: (y = [23]\.\d\dx \+ -[01]\.\d\d)$"
TORCHX_SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([float(dist.get_rank())])
dist.all_reduce(ranks)
print(f"of {dist.get_world_size()}: {ranks.item():g}, epoch {os.environ['RDZV_ETCD_EPOCH']}.")
dist.barrier()
dist.destroy_process_group()
"""


def make_environment(framework: str, folder: Path) -> Path:
    """Make a virtual environment; return its Python. Takes half a minute.

    It sees the packages of the environment that the tests run in, so that torch and this package
    are not installed twice, and has only its framework's packages besides. Nothing that is there
    already can be replaced, torch least of all: every installed version is a constraint. Skips the
    test where no package index can be reached.
    """
    environment = folder / framework
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    here = sysconfig.get_paths()["purelib"]
    there = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (there / "tests.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "\n".join(f"{it.name}=={it.version}" for it in importlib.metadata.distributions()) + "\n"
    )
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    pip += ["--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:"]
    pip += ["--constraint", constraints]
    for packages in FRAMEWORKS[framework]:
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if "Failed to establish a new connection" in done.stderr:
            pytest.skip(f"no package index can be reached for {framework}")
        assert done.returncode == 0, f"{packages} could not be installed:\n{done.stderr}"
    assert not (there / "torch").exists()
    return python


@pytest.fixture(scope="module")
def python_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the Python of a framework's environment, which is made once."""

    @functools.cache
    def made(framework: str) -> str:
        return str(make_environment(framework, tmp_path_factory.mktemp(framework)))

    return made


def torchrun(server: EtcdServer, job_id: str) -> list[str]:
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={server.endpoint}"]
    return [*command, f"--rdzv-id={job_id}", "--rdzv-conf=lease_ttl=3"]


def check_that_both_agree(started: list[Program], line: str) -> None:
    found = [program.wait_for(line) for program in started]
    assert {it[1] for it in found} == {"0", "1"}
    assert len({it[2] for it in found}) == 1
    assert [program.end() for program in started] == [0, 0]


@pytest.mark.parametrize(
    ("framework", "command", "line"),
    [
        ("accelerate", ("accelerate_script.py", "--cpu"), SAME_WEIGHT),
        ("lightning", ("lightning_trainer.py",), LEARNT),
    ],
)
def test_under_torchrun_nothing_else_is_needed(
    etcd_server: EtcdServer,
    job_id: str,
    programs: Programs,
    python_of: Callable[[str], str],
    tmp_path: Path,
    framework: str,
    command: tuple[str, ...],
    line: str,
) -> None:
    started = [
        programs.start(
            *command,
            python=python_of(framework),
            launcher=torchrun(etcd_server, job_id),
            HF_HOME=str(tmp_path),  # else accelerate would read this user's settings
        )
        for _ in range(2)
    ]
    check_that_both_agree(started, line)


def test_accelerate_launch_passes_the_backend_on(
    etcd_server: EtcdServer,
    job_id: str,
    programs: Programs,
    python_of: Callable[[str], str],
    tmp_path: Path,
) -> None:
    host, _, port = etcd_server.target.rpartition(":")
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launch += ["--num_machines=2", "--num_processes=2", "--machine_rank=1"]
    launch += ["--rdzv_backend=etcd3", f"--main_process_ip={host}", f"--main_process_port={port}"]
    started = [
        programs.start(
            "accelerate_script.py",
            "--cpu",
            python=python_of("accelerate"),
            launcher=launch,
            HF_HOME=str(tmp_path),
            PET_RDZV_ID=job_id,
            PET_RDZV_CONF="lease_ttl=3",
        )
        for _ in range(2)
    ]
    check_that_both_agree(started, SAME_WEIGHT)
    assert etcd_server.keys(f"/rdzv_etcd/{job_id}/".encode())  # the job had the name it was given


def test_a_lightning_trainer_gets_its_place_from_the_group(
    etcd_server: EtcdServer, job_id: str, programs: Programs, python_of: Callable[[str], str]
) -> None:
    command = ("lightning_trainer.py", etcd_server.endpoint, job_id)
    started = [programs.start(*command, python=python_of("lightning")) for _ in range(2)]
    check_that_both_agree(started, LEARNT)


def test_jax_processes_work_together_and_continue_without_a_lost_one(
    etcd_server: EtcdServer, job_id: str, programs: Programs, python_of: Callable[[str], str]
) -> None:
    """The launcher of one of two is killed; the other's JAX process is replaced by one alone."""
    command = ("jax_processes.py", etcd_server.endpoint, job_id, "--nodes=1:2", "--steps=500")
    victim, survivor = started = [
        programs.start(*command, python=python_of("jax"), JAX_PLATFORMS="cpu") for _ in range(2)
    ]
    for program in started:
        program.wait_for("^step 3: 2 processes, 2 devices, sum of ranks 1$")
    programs.kill(victim)
    victim.end()  # its JAX process has ended, too: it would hold the pipe
    survivor.wait_for("^world 1 is over: lost ")
    survivor.wait_for("^step 500: 1 processes, 1 devices, sum of ranks 0$")
    assert survivor.end() == 0


def test_a_killed_ray_actor_comes_back_into_the_world(
    etcd_server: EtcdServer, job_id: str, programs: Programs, python_of: Callable[[str], str]
) -> None:
    # Short: Ray has its sockets there.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        program = programs.start(
            "ray_actors.py",
            etcd_server.endpoint,
            job_id,
            "--steps=200",
            python=python_of("ray"),
            HOME=folder,
            RAY_TMPDIR=folder,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
        )
        found = [program.wait_for(r"(rank \d) of 2, step 20, pid (\d+)") for _ in range(2)]
        pids = {it[1]: int(it[2]) for it in found}
        os.kill(pids["rank 1"], signal.SIGKILL)
        again = {program.wait_for(r"(rank \d) of 2 begins at step [1-9]\d*")[1] for _ in range(2)}
        assert again == pids.keys()
        ended = {program.wait_for(r"actor (\d): ended at step 200")[1] for _ in range(2)}
        assert ended == {"0", "1"}
        assert program.end() == 0
        assert any(PROCESS_EXITED in line for line in program.lines)


@pytest.mark.parametrize("component", ["torchx's own", "ours"])
def test_two_nodes_of_torchx_s_local_scheduler_meet(
    component: str,
    etcd_server: EtcdServer,
    programs: Programs,
    python_of: Callable[[str], str],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(TORCHX_SCRIPT)
    host, _, port = etcd_server.target.rpartition(":")
    assert host == "127.0.0.1"
    python = python_of("torchx")
    run = [python, str(Path(python).with_name("torchx")), "run", "--scheduler=local_cwd"]
    if component == "ours":
        run += [f"{LAUNCHERS / 'torchx_component.py'}:ddp", "--etcd", etcd_server.endpoint]
        run += ["--conf", "lease_ttl=3"]
    else:
        run += ["dist.ddp", "--rdzv_backend", "etcd3", "--rdzv_port", port, "--tee", "3"]
    # What it starts is "python" and "torchrun", wherever those are.
    folders = [str(Path(one).parent) for one in (python, sys.executable)]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    program = programs.run(*run, "-j", "2x1", "--script", tmp_path / "train.py", PATH=path)
    for _ in range(2):
        program.wait_for(r"of 2: 1, epoch [1-9]\d*\.")
    assert program.end() == 0
