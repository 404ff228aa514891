"""Reads user and password from their files, now and again when they have been rotated.

Knows what such a file looks like. Must not know what the secrets are for, nor put one in a message.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import Credentials

_from_pipes: dict[tuple[int, int], str] = {}
"""What was in a pipe, by its device and inode: it can be read only once in a process."""


def read_secret(path: Path, typed: str) -> str:
    """Return the file's line; ``typed`` is the option that named it. Blocks until a pipe is told.

    Raises :class:`SettingsError` if it cannot be read, is empty or no text.
    """
    try:
        text = _read_pipe(path) if path.is_fifo() else path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{typed}={str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{typed}={str(path)!r} is not UTF-8 text") from error
    # A Kubernetes Secret that was made from a file ends with the file's newline.
    line = text.rstrip("\r\n")
    if not line:
        raise SettingsError(f"{typed}={str(path)!r} is empty")
    return line


def read_again(credentials: Credentials) -> Credentials:
    """Return the credentials with what their files contain now. Raises :class:`SettingsError`."""
    user, password = credentials.user, credentials.password
    if credentials.user_file is not None:
        user = read_secret(credentials.user_file, "user_file")
    if credentials.password_file is not None:
        password = read_secret(credentials.password_file, "password_file")
    return replace(credentials, user=user, password=password)


def _read_pipe(path: Path) -> str:
    """``--rdzv-conf=password_file=<(command)``."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino)
    if identity not in _from_pipes:
        _from_pipes[identity] = path.read_text(encoding="utf-8")
    return _from_pipes[identity]
