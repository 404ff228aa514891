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
FACES = {"blocking": rdzv_etcd, "asynchronous": rdzv_etcd.aio}
FOR_TORCH = {"keep"}
"""Needed by the torch plugin's C++ side only."""


def names_in(program: str) -> set[str]:
    """All attributes that a program uses."""
    tree = ast.parse((HERE / f"{program}.py").read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("face", FACES)
def test_the_programs_use_every_public_name(face: str) -> None:
    """If this fails, add what is new to that program, with the types that users rely on."""
    used = names_in(face)
    for kind in ("Group", "World", "RoundStore"):
        assert public(getattr(FACES[face], kind)) - FOR_TORCH - used == set(), kind
    if face == "blocking":
        assert set(rdzv_etcd.__all__) - {"aio", "errors"} - used == set()


@pytest.mark.slow
def test_programs_pass_and_their_mistakes_do_not(tmp_path: Path) -> None:
    """As a user runs mypy, without this project's settings. An unused ``type: ignore`` is an error,
    too: each mistake in the programs has to be found. The launchers' frameworks are not installed
    here: what comes from them may be anything."""
    pytest.importorskip("mypy", reason="mypy comes with the extra lint")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.10"]
    command += ["--ignore-missing-imports", "--allow-subclassing-any"]
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
