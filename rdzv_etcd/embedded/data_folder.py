"""Where an embedded etcd keeps its data: a folder of its own, deleted with it, or by the next one.

Knows files only. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

FOLDER_PREFIX = "rdzv-etcd-embedded-"


def make_folder() -> tuple[Path, int]:
    """Make a folder that nobody else may read; return it and the descriptor that holds it.

    Deletes what killed supervisors left beside it. Raises OSError if there is no place for it.
    """
    place = _temporary()
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
    try:
        return folder, _lock(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_folder(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def _temporary() -> Path:
    """The system's folder for temporary files. Never the working directory, Python's last resort:
    that is ``/`` here."""
    try:
        found = Path(tempfile.gettempdir())
    except FileNotFoundError:
        found = Path("/")
    if found == Path("/"):
        named = os.environ.get("TMPDIR")
        tried = "/tmp, /var/tmp" if named is None else f"TMPDIR={named}, /tmp, /var/tmp"
        raise OSError(
            f"none of {tried} and /usr/tmp can be written; set TMPDIR to a folder that can, with "
            "200 MB free"
        )
    return found


def _lock(folder: Path) -> int:
    """Mark a data directory as in use by this process; returns the descriptor that holds it."""
    unfinished = folder / "lock.new"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unfinished.rename(folder / "lock")  # it never exists unlocked while its owner lives
    return descriptor


def _sweep(place: Path) -> None:
    """Delete what killed supervisors left: batch systems end a job by killing all its processes."""
    for lock in place.glob(f"{FOLDER_PREFIX}*/lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just being removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(descriptor)
