"""What was measured on and with what: commit, versions, cores, their speed, disk, load, date.

Knows this machine only as far as a reader needs it to judge the numbers: no names, no paths.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import psutil

PACKAGES = ("torch", "grpcio", "protobuf", "etcd3", "python-etcd", "rdzv-etcd")


def describe(*, etcd_version: str | None, data: Path | None, fsync: bool) -> dict[str, object]:
    """Return what every result file carries; ``data`` is the folder that etcd writes to."""
    found: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],  # what follows names the distribution
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "million_additions_s": million_additions_s(),
        "etcd": etcd_version,
        "etcd_fsync": fsync,
    }
    for package in PACKAGES:
        found[package] = _version(package)
    if data is not None:
        found["etcd_file_system"] = file_system(data)
    return found


def million_additions_s() -> float:
    """Return the CPU time that Python takes for a million additions here, the best of ten.

    A shared machine is not equally fast every day: two files are compared with this beside them.
    """

    def add() -> float:
        started, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        return time.process_time() - started

    return round(min(add() for _ in range(10)), 4)


def file_system(folder: Path) -> str:
    """Return the type of the file system that ``folder`` is on, such as ``ext4`` or ``tmpfs``."""
    here = folder.resolve()
    mounts = psutil.disk_partitions(all=True)
    holding = [mount for mount in mounts if here.is_relative_to(mount.mountpoint)]
    nearest = max(holding, key=lambda mount: len(mount.mountpoint), default=None)
    return "unknown" if nearest is None else nearest.fstype


def _commit() -> str | None:
    """Return the checkout's commit, with ``+`` if anything but results differs from it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    changed = [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=7", "HEAD"], text=True)
        return head.strip() + "+" * subprocess.run(changed, check=False).returncode
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
