"""Nodes of another version of this package in one job with nodes of this one.

The older version is the newest release, or the revision that ``RDZV_ETCD_TEST_OLDER`` names.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import output, run
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.release]

ROOT = Path(__file__).parents[2]


def with_package_in(folder: Path) -> dict[str, Any]:
    """Return what makes :meth:`Training.start` start an agent with the package in that folder."""
    path = f"PYTHONPATH={folder}"
    found = [sys.executable, "-c", "import rdzv_etcd; print(rdzv_etcd.__file__)"]
    assert output(["env", path, *found], cwd=folder) == f"{folder / 'rdzv_etcd' / '__init__.py'}\n"
    return {"enter": lambda line: ["env", path, *line]}


@pytest.fixture
def older(tmp_path: Path) -> dict[str, Any]:
    revision = os.environ.get("RDZV_ETCD_TEST_OLDER")
    if not revision:
        tags = run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT)
        if tags.returncode != 0:
            pytest.skip("there is no earlier release")
        revision = tags.stdout.strip()
    file, folder = tmp_path / "older.tar", tmp_path / "older"
    output(["git", "archive", f"--output={file}", revision, "rdzv_etcd"], cwd=ROOT)
    folder.mkdir()
    output(["tar", "-xf", file, "-C", folder])
    return with_package_in(folder)


def test_nodes_are_upgraded_one_after_another(
    train: Callable[..., Training], older: dict[str, Any]
) -> None:
    """The leader is killed, the next node gets a SIGTERM, the last is drained, and each time a node
    of this version takes the place. Nodes of both lead, and watch each other."""
    job = train("2:3", allreduce=True)
    nodes = job.start("a", "b", "c", **older)
    job.wait_for_world()
    leader = job.leader()
    leader.kill()
    job.wait_for_world()
    job.start("new-1")
    job.wait_for_world()

    first, second = (agent for agent in nodes if agent is not leader)
    first.terminate()
    job.wait_for_world()
    job.start("new-2")
    job.wait_for_world()

    second.process.send_signal(signal.SIGUSR1)
    assert second.wait() == 0
    job.wait_for_world()
    job.start("new-3")
    job.wait_for_world()
    with job.undisturbed():
        pass
    job.finish()


def test_a_node_with_another_format_is_refused(
    train: Callable[..., Training], tmp_path: Path
) -> None:
    """Its values have a newer version, and it finds older ones; the job does not notice."""
    folder = tmp_path / "newer"
    shutil.copytree(ROOT / "rdzv_etcd", folder / "rdzv_etcd")
    codec = folder / "rdzv_etcd" / "protocol" / "codec.py"
    text = codec.read_text(encoding="utf-8")
    assert "\nVERSION = 1\n" in text
    codec.write_text(text.replace("\nVERSION = 1\n", "\nVERSION = 2\n"), encoding="utf-8")

    job = train("1:3")
    job.start("a", "b")
    job.wait_for_world()
    with job.undisturbed():
        (newer,) = job.start("newer", **with_package_in(folder))
        assert newer.wait() != 0
    assert "it has format version 1, and this library reads 2" in newer.output
    job.finish()
