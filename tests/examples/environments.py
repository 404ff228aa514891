"""Virtual environments for frameworks that are no part of this project's: made for one test file.

Each sees the packages of the environment that the tests run in, so that torch and this package are
not installed twice, and has only its framework's packages besides. Whatever else a framework asks
for, nothing that is there already can be replaced, torch least of all: every installed version is a
constraint.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
"""What pip is told for each, one call after the other: all that these tests need of it."""


def make_environment(framework: str, folder: Path) -> Path:
    """Make the environment; return its Python. Takes half a minute. Skips the test where no package
    index can be reached, which CI does not allow."""
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
