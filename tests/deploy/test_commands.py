"""Start commands as people write them: each runs with nothing but backend and endpoint changed.

``tests/deploy/commands`` has their shapes, met in public scripts, manifests and reports. The
programs around torchrun (srun, mpirun, ssh, singularity, ...) are stand-ins that start what they
are given, once for each node where the real ones do. torchrun and etcd are real; a command that
names ``torchrun`` gets one that is forked from a process that has torch (see tests/torchrun).
"""

from __future__ import annotations

import json
import os
import re
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.examples import Launch, launch
from tests.support.processes import kill_marked, spawn
from tests.support.servers import EtcdServer
from tests.support.suite import COLD_STARTS_VARIABLE
from tests.torchrun.fork_server import HERE, Forked

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

PATIENCE_S = 300.0
COMMANDS = sorted((Path(__file__).parent / "commands").iterdir())
_MARK = "RDZV_ETCD_COMMAND_TEST"
_RAN = "RAN"
_ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "USER": "trainer",
}

_WORKER = """
import json, os, socket, uuid
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 30).close()
with open(os.path.join(os.environ["RAN"], uuid.uuid4().hex), "x") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""
# Asks this test's process for a torchrun, waits for its end, and ends as it did.
_TORCHRUN = f"""#!{sys.executable} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as test:
    test.connect(os.environ["FORKS"])
    asked = {{"arguments": sys.argv[1:], "output": f"/proc/{{os.getpid()}}/fd/1"}}
    asked |= {{"environ": dict(os.environ), "cwd": os.getcwd()}}
    test.sendall(json.dumps(asked).encode() + b"\\n")
    sys.exit(int(test.recv(16)))
"""
_FOR_EACH_NODE = r"""
pids=()
for node in $(seq 0 $((count - 1))); do
    SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 PMI_RANK=$node "$@" & pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait $pid || status=$?; done
exit $status
"""
_PROGRAMS = {
    "srun": r"""
count=2
while [[ $1 == -* ]]; do
    case $1 in
    --nodes=*|--ntasks=*) count=${1#*=} ;;
    -N|-n) count=$2; shift ;;
    -w) shift ;;
    esac
    shift
done"""
    + _FOR_EACH_NODE,
    "mpirun": r"""
while [[ $1 == -* ]]; do
    case $1 in -n|-np) count=$2; shift ;; -H) shift ;; esac
    shift
done"""
    + _FOR_EACH_NODE,
    "pbsdsh": "count=2; shift" + _FOR_EACH_NODE,
    "ssh": 'shift; exec bash -c "$*"',
    "singularity": r"""
shift
while [[ $1 == -* ]]; do [[ $1 == -B ]] && shift; shift; done
shift; exec "$@" """,
    "scontrol": '[[ $1 == show && $2 == hostname* ]] && printf "node0\\nnode1\\n"',
    "hostname": "[[ $# == 0 ]] && echo node0 || echo 127.0.0.1",
    "nvidia-smi": 'printf "GPU 0: (UUID: a)\\nGPU 1: (UUID: b)\\n"',
    "module": ":",
    "activate": ":",
}

# A user changes the backend's name and its server's address.
_BACKEND = re.compile(
    r"(rdzv[_-]backend[ =]|PET_RDZV_BACKEND=|rdzvBackend: )(?:c10d|etcd-v2|etcd)\b"
)
_ENDPOINT = re.compile(
    r"""(rdzv[_-]endpoint[ =]|PET_RDZV_ENDPOINT=)(?:"[^"]*"|'[^']*'\S*?(?=[\s\\])|[^\s'"]+)"""
)


@dataclass(frozen=True)
class Shape:
    """One file: how it is started, and what comes of it."""

    path: Path
    once: bool
    """One start is for all nodes; else each node starts it."""
    nodes: int
    workers: int

    @staticmethod
    def of(path: Path) -> Shape:
        head = re.search(
            r"^#: (once for|on each of) (\d) nodes, (\d) workers$", path.read_text(), re.MULTILINE
        )
        assert head, f"{path}: how is it started?"
        return Shape(path, head[1] == "once for", int(head[2]), int(head[3]))

    def with_ours(self, server: EtcdServer, folder: Path) -> Path:
        """Write it with the backend changed, as a user would."""
        text, backends = _BACKEND.subn(r"\1etcd3", self.path.read_text())
        text, endpoints = _ENDPOINT.subn(rf"\g<1>{server.target}", text)
        if "rdzvHost" in text:
            host, port = server.target.rsplit(":", 1)
            text, endpoints = re.subn(r"rdzvHost: \S+", f"rdzvHost: {host}", text)
            text = re.sub(r"rdzvPort: \d+", f"rdzvPort: {port}", text)
        assert (backends, endpoints) == (1, 1), text
        changed = folder / self.path.name
        changed.write_text(text)
        return changed


class Forks(socketserver.ThreadingUnixStreamServer):
    """Forks the torchrun that a command starts from a process that has torch."""

    def __init__(self, at: Path) -> None:
        super().__init__(str(at), Answer)
        self.started: list[Forked] = []
        self.lock = threading.Lock()


class Answer(socketserver.StreamRequestHandler):
    server: Forks

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        output, cwd = Path(asked.pop("output")), Path(asked.pop("cwd"))
        with self.server.lock:
            torchrun = HERE.start((), **asked, output=output, cwd=cwd)
            self.server.started.append(torchrun)
        while (code := self._poll(torchrun)) is None:
            time.sleep(0.02)
        self.wfile.write(str(code).encode())

    def _poll(self, torchrun: Forked) -> int | None:
        with self.server.lock:
            return torchrun.poll()


@pytest.fixture
def forks() -> Iterator[Forks | None]:
    """None before a release: then the command finds this environment's own torchrun."""
    if COLD_STARTS_VARIABLE in os.environ:
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="rz") as folder,  # short: it is part of a socket's path
        Forks(Path(folder, "forks")) as server,
    ):
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


SHAPES = [Shape.of(path) for path in COMMANDS]
FOR_CI = {
    "elastic.sh",
    "etcd-v2-backend.sh",
    "leftover-master-addr.sh",
    "local-addr.sh",
    "logs-and-roles.sh",
    "nohup.sh",
    "one-host-of-two.sh",
    "pytorchjob.yaml",
    "slurm-srun.sbatch",
    "statefulset.yaml",
    "torch-distributed-launch.sh",
}
"""One of each kind that could matter to the backend. The others differ in what torchrun's own
parser, or a program around it, makes of the same."""


def test_there_are_scripts_manifests_and_plain_lines() -> None:
    assert len(SHAPES) >= 20
    assert {shape.path.suffix for shape in SHAPES} == {".sh", ".sbatch", ".yaml"}
    assert {shape.once for shape in SHAPES} == {True, False}
    assert {path.name for path in COMMANDS} >= FOR_CI


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            shape,
            id=shape.path.name,
            marks=() if shape.path.name in FOR_CI else pytest.mark.release,
        )
        for shape in SHAPES
    ],
)
def test_a_command_runs_with_backend_and_endpoint_changed(
    shape: Shape, etcd: EtcdServer, tmp_path: Path, forks: Forks | None
) -> None:
    here, ran = tmp_path / "here", tmp_path / "ran"
    environment = _prepare(here, ran, tmp_path / "programs", forks)
    changed = shape.with_ours(etcd, tmp_path)
    logs = [tmp_path / f"node{node}.log" for node in range(1 if shape.once else shape.nodes)]
    mark = str(tmp_path)
    processes = []
    try:
        for node, log in enumerate(logs):
            started = _started(changed, node, tmp_path)
            variables = {**environment, _MARK: mark, **started.environment}
            processes.append(
                spawn(("/usr/bin/env", "-C", here, *started.command), log, env=variables)
            )
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for torchrun in forks.started if forks else ():  # these do not carry the mark
            torchrun.kill()
        kill_marked(_MARK, mark)
    said = "\n".join(file.read_text() for file in [*logs, *here.glob("*.log*")])
    assert codes == [0] * len(logs), said
    workers = [json.loads(file.read_text()) for file in ran.iterdir()]
    assert sorted(int(worker["RANK"]) for worker in workers) == [*range(shape.workers)], said
    assert {int(worker["WORLD_SIZE"]) for worker in workers} == {shape.workers}
    assert {int(worker["GROUP_RANK"]) for worker in workers} == {*range(shape.nodes)}
    assert len({(worker["MASTER_ADDR"], worker["MASTER_PORT"]) for worker in workers}) == 1
    assert "Traceback" not in said


@pytest.fixture
def etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """A server of this test's own: people call their jobs 1, or 100."""
    return fresh_etcd()


def _prepare(here: Path, ran: Path, programs: Path, forks: Forks | None) -> dict[str, str]:
    """Lay out what a command finds in its folder and on its path; return its environment."""
    for folder in (here, ran, programs):
        folder.mkdir()
    (here / "train.py").write_text(_WORKER)
    (here / "train.sh").write_text(f"#!/bin/bash\nexec {sys.executable} {here / 'train.py'}\n")
    (here / "train.sh").chmod(0o755)
    for name, lines in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{lines}\n")
    if forks is not None:
        (programs / "torchrun").write_text(_TORCHRUN)
    for program in programs.iterdir():
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("PET_")}
    ours = {"PATH": path, _RAN: str(ran), "MASTER_IP": "10.0.0.4", "OMP_NUM_THREADS": "1"}
    return {**inherited, **_ALLOCATION, **ours, "FORKS": str(forks and forks.server_address)}


def _started(changed: Path, node: int, folder: Path) -> Launch:
    """Return what one start runs: a script's shell, or a pod's command as its platform has it."""
    if changed.suffix == ".yaml":
        return launch(changed, node, folder)
    numbers = {"NODE_RANK": str(node), "RANK": str(node), "SLURM_PROCID": str(node)}
    return Launch(("bash", str(changed)), numbers)
