"""Reads user and password from their files, now and again when they have been rotated.

Knows what such a file looks like, how long a pipe is waited for, and what is no file. Must not know
what the secrets are for, nor put one in a message.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import time
from dataclasses import replace
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import Credentials
from rdzv_etcd.settings.fields import MAX_SECRET

_log = logging.getLogger(__name__)

_from_pipes: dict[tuple[int, int], bytes] = {}
"""What was in a pipe, by its device and inode: it can be read only once in a process."""


def read_secret(
    path: Path,
    typed: str,
    *,
    may_wait: bool = True,
    warn_after_s: float = 10.0,
    limit_s: float = 60.0,
) -> str:
    """Return the file's line; ``typed`` is the option that named it.

    Blocks until a pipe is told, which a person may have to do, but not beyond ``limit_s``; a pipe
    that has not been read before is refused unless it ``may_wait``. Raises :class:`SettingsError`
    if it cannot be read, is empty, too large or no text.
    """
    named = f"{typed}={str(path)!r}"
    try:
        text = _content(path, named, may_wait, warn_after_s, limit_s).decode()
    except OSError as error:
        raise SettingsError(f"{named} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{named} is not UTF-8 text") from error
    # A Kubernetes Secret that was made from a file ends with the file's newline.
    line = text.rstrip("\r\n")
    if not line:
        raise SettingsError(f"{named} is empty")
    return line


def read_again(credentials: Credentials) -> Credentials:
    """Return the credentials with what their files contain now. Raises :class:`SettingsError`.

    Waits for nobody: an event loop calls this, and keeps leases meanwhile.
    """
    user, password = credentials.user, credentials.password
    if credentials.user_file is not None:
        user = read_secret(credentials.user_file, "user_file", may_wait=False)
    if credentials.password_file is not None:
        password = read_secret(credentials.password_file, "password_file", may_wait=False)
    return replace(credentials, user=user, password=password)


def read_file(path: Path, named: str, most: int) -> bytes:
    """Return what is in a file of at most so many bytes, without waiting for anybody.

    Raises OSError, and :class:`SettingsError` if it is larger, a pipe or a device.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # to open a directory tells what it is
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise SettingsError(f"{named} is a {kind}; it must be a file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(named, most)
    return content


def _too_large(named: str, most: int) -> SettingsError:
    return SettingsError(f"{named} is larger than {most} bytes: is it another file?")


def _content(path: Path, named: str, may_wait: bool, warn_after_s: float, limit_s: float) -> bytes:
    status = path.stat()
    if not stat.S_ISFIFO(status.st_mode):
        return read_file(path, named, MAX_SECRET)
    identity = (status.st_dev, status.st_ino)  # --rdzv-conf=password_file=<(command)
    if identity in _from_pipes:
        return _from_pipes[identity]
    if not may_wait:
        raise SettingsError(
            f"{named} is a pipe now, which nobody waits for while a job runs: put a file there"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or it waits for the other end
    try:
        content = _read_pipe(descriptor, named, warn_after_s, limit_s)
    finally:
        os.close(descriptor)
    _from_pipes[identity] = content
    return content


def _read_pipe(descriptor: int, named: str, warn_after_s: float, limit_s: float) -> bytes:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    began_s = time.monotonic()
    has_warned = False
    content = b""
    while len(content) <= MAX_SECRET:
        due_s = began_s + (limit_s if has_warned else warn_after_s)
        if ready.poll(1000 * max(0.0, due_s - time.monotonic())):
            part = os.read(descriptor, MAX_SECRET + 1 - len(content))
            if not part:
                return content
            content += part
        elif has_warned:
            raise SettingsError(
                f"{named} is a pipe, and nobody has written to it and closed it within {limit_s:g} "
                "s: does the command work that should?"
            )
        else:
            has_warned = True
            _log.warning(
                "waiting until somebody writes to the pipe %s and closes it, for %g s at most",
                named,
                limit_s,
            )
    raise _too_large(named, MAX_SECRET)
