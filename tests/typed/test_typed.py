"""Users' programs pass ``mypy --strict``, use all there is, and do what they say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rdzv_etcd
from tests.support.servers import EtcdServer

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FACES = ("blocking", "asynchronous")
FOR_TORCH = {"keep"}
"""Needed by the torch plugin's C++ side only."""


def test_the_blocking_program_uses_every_public_name() -> None:
    """If this fails, add what is new to that program, with the types that users rely on."""
    tree = ast.parse((HERE / "blocking.py").read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for kind in (rdzv_etcd.Group, rdzv_etcd.World, rdzv_etcd.RoundStore):
        public = {name for name in dir(kind) if not name.startswith("_")}
        assert public - FOR_TORCH - used == set(), kind
    assert set(rdzv_etcd.__all__) - {"aio", "errors"} - used == set()


@pytest.mark.slow
def test_programs_pass_and_their_mistakes_do_not(tmp_path: Path) -> None:
    """As a user runs mypy, without this project's settings. An unused ``type: ignore`` is an error,
    too: each mistake in the programs has to be found. Other packages are not looked at, which would
    take most of the time: what comes from torch or a framework may be anything."""
    pytest.importorskip("mypy", reason="mypy comes with the extra lint")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.10"]
    command += ["--no-site-packages", "--ignore-missing-imports", "--allow-subclassing-any"]
    command += ["--follow-imports=silent"]  # as where this package is an installed one
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "users")]
    programs = [HERE / f"{face}.py" for face in FACES]
    for words in (["--explicit-package-bases", *programs], [ROOT / "examples" / "launchers"]):
        done = subprocess.run(
            [*command, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "MYPYPATH": str(ROOT)},
        )
        assert done.stdout.startswith("Success"), done.stdout + done.stderr


@pytest.mark.parametrize("face", FACES)
def test_the_programs_work(face: str, etcd_server: EtcdServer, job_id: str) -> None:
    command = [sys.executable, "-m", f"tests.typed.{face}", etcd_server.endpoint, job_id]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
