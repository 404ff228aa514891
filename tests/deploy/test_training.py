"""Two nodes train with what an example passes them, on an etcd with TLS and users.

Replaced are only addresses, paths, the number of workers (one) and the time of the last call.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.conftest import ADDRESS, DocumentedEtcd
from tests.deploy.examples import MOUNTED, TRAINING, Launch, at_home, launch
from tests.support.processes import kill_marked, spawn

PATIENCE_S = 240.0
NODES = 2
SLURM_ADDRESSES = "https://etcd-1.example.com,https://etcd-2.example.com,https://etcd-3.example.com"
WITH_RANK_KEY = {
    "trainjob.yaml",
    "indexed-job.yaml",
    "statefulset.yaml",
    "slurm.sbatch",
    "runai.sh",
}
_MARK = "RDZV_ETCD_DEPLOY_TEST"

# An etcd embedded in a job is what tests/torchrun/test_embedded.py is about.
# They differ in what starts torchrun: one is enough for CI.
_FOR_CI = "trainjob.yaml"
EXAMPLES = [
    pytest.param(
        path,
        id=path.name,
        marks=pytest.mark.slow if path.name == _FOR_CI else pytest.mark.release,
    )
    for path in TRAINING
    if "embedded" not in path.name
]


@pytest.fixture
def start() -> Iterator[Callable[[Launch, Path], subprocess.Popen[bytes]]]:
    """Starts nodes; ends what is left of them and their workers, and shows what they wrote."""
    mark, logs = uuid.uuid4().hex, []

    def started(planned: Launch, log: Path) -> subprocess.Popen[bytes]:
        logs.append(log)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark, **planned.environment}
        return spawn(planned.command, log, env=environment)

    with ExitStack() as stack:
        stack.callback(lambda: [print(f"== {log}\n{log.read_text()}") for log in logs])
        stack.callback(kill_marked, _MARK, mark)
        yield started


@pytest.mark.torchrun
@pytest.mark.parametrize("path", EXAMPLES)
def test_two_nodes_train(
    path: Path,
    documented_etcd: Callable[..., DocumentedEtcd],
    start: Callable[[Launch, Path], subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    etcd = documented_etcd()
    processes = {}
    for index in reversed(range(NODES)):  # a rank key is to decide, not who comes first
        folder = tmp_path / f"node{index}"
        folder.mkdir()
        planned = launch(path, index, folder)
        here = at_home(
            planned,
            _address(path, etcd),
            (MOUNTED, str(etcd.secret)),
            ("/checkpoints", str(folder)),
        )
        if "last_call_timeout=20" in str(
            here
        ):  # counts from the second node on: no other will come
            here = here.replaced(("last_call_timeout=20", "last_call_timeout=1"))
        command = (*here.command, "--passes=1", f"--step-log={folder / 'steps'}")
        processes[index] = start(Launch(command, here.environment), folder / "output")
    assert [processes[index].wait(PATIENCE_S) for index in range(NODES)] == [0, 0]
    ranks = {}
    for index in range(NODES):
        steps = [
            json.loads(line) for line in (tmp_path / f"node{index}/steps").read_text().splitlines()
        ]
        assert {step["world_size"] for step in steps} == {NODES}
        assert [step["step"] for step in steps] == list(range(1, 25))
        assert all(step["epoch"] > 0 for step in steps)
        (ranks[index],) = {step["rank"] for step in steps}
        assert (tmp_path / f"node{index}/digits.pt").exists()
    assert sorted(ranks.values()) == [0, 1]
    if path.name in WITH_RANK_KEY:
        assert ranks == {0: 0, 1: 1}


def _address(path: Path, etcd: DocumentedEtcd) -> tuple[str, str]:
    if path.suffix == ".sbatch":
        return SLURM_ADDRESSES, etcd.server.endpoint
    return ADDRESS, etcd.server.target
