"""Reads secrets from their files, user and password again when they have been rotated.

Knows what such a file looks like and how long a pipe is waited for. Must not know what the secrets
are for, nor put one in a message.
"""

from __future__ import annotations

import logging
import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.log import TookTooLongError, watched
from rdzv_etcd.settings.connection import Credentials, Tls
from rdzv_etcd.settings.fields import MAX_SECRET
from rdzv_etcd.trust import SHORTEST_SECRET, client_files

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LIMIT_S = 60.0
"""How long a file or a pipe is waited for."""
_from_pipes: dict[tuple[Path, int, int], bytes] = {}
"""What was in a pipe, which can be read only once in a process; by its path, device and inode, as a
file system may use an inode again."""


def read_secret(
    path: Path,
    typed: str,
    *,
    may_wait: bool = True,
    is_private: bool = False,
) -> str:
    """Return the file's line; ``typed`` is the option that named it.

    Blocks until a pipe is written to and closed, which a person may have to do, but not beyond
    a minute; a pipe that has not been read before is refused unless it ``may_wait``. Raises
    :class:`SettingsError` if it cannot be read, is empty, too large or no text, or ``is_private``
    but open to other users.
    """
    named = f"{typed}={str(path)!r}"
    try:
        status = path.stat()
        if not stat.S_ISFIFO(status.st_mode):
            content = read_file(path, named, MAX_SECRET, is_private=is_private)
        elif (identity := (path, status.st_dev, status.st_ino)) in _from_pipes:
            content = _from_pipes[identity]
        elif may_wait:
            content = _from_pipes[identity] = _read_pipe(path, named, is_private)
        else:
            raise SettingsError(
                f"{named} is a pipe now, which is not waited for while a job runs: put a file there"
            )
        text = content.decode()
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

    Does not wait for a pipe, but blocks for as long as a file system does.
    """
    user, password = credentials.user, credentials.password
    if credentials.user_file is not None:
        user = read_secret(credentials.user_file, "user_file", may_wait=False)
    if credentials.password_file is not None:
        password = read_secret(credentials.password_file, "password_file", may_wait=False)
    return replace(credentials, user=user, password=password)


def check_embed_secret(secret: str, named: str) -> None:
    """Raise :class:`SettingsError` if it can be guessed."""
    if len(secret) < SHORTEST_SECRET:
        raise SettingsError(
            f"{named} has {len(secret)} characters, and must have at least {SHORTEST_SECRET}: who "
            "guesses it controls the workers; make one with `openssl rand -hex 32`"
        )


def tls_from(secret: str) -> Tls:
    """Return the client's part of a secret; raises :class:`SettingsError` if it cannot be made."""
    return Tls(*client_files(secret))


def read_file(path: Path, named: str, most: int, *, is_private: bool = False) -> bytes:
    """Return what is in a file of at most so many bytes, without waiting for a writer.

    Raises OSError, and :class:`SettingsError` if it is larger, a pipe or a device, or
    ``is_private`` but open to other users.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a directory fails as such
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise SettingsError(f"{named} is a {kind}; it must be a file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if is_private:
            _check_private(file.fileno(), path, named)
        return _at_most(most, file.read(most + 1), named)


def _at_most(most: int, content: bytes, named: str) -> bytes:
    if len(content) > most:
        raise SettingsError(f"{named} is larger than {most} bytes: is it another file?")
    return content


def _check_private(descriptor: int, path: Path, named: str) -> None:
    mode = os.fstat(descriptor).st_mode
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise SettingsError(
            f"{named} is open to every user of this machine (mode {stat.S_IMODE(mode):04o}): "
            f"`chmod 600 {shlex.quote(str(path))}`; in a Kubernetes Secret's volume set "
            "defaultMode: 0400"
        )


def _read_pipe(path: Path, named: str, is_private: bool) -> bytes:
    """Read ``--rdzv-conf=password_file=<(command)``."""

    def read() -> bytes:
        with path.open("rb") as pipe:
            if is_private:
                _check_private(pipe.fileno(), path, named)
            return pipe.read(MAX_SECRET + 1)

    lacks = "it is a pipe, and no command has written to it and closed it: does the command run?"
    return _at_most(MAX_SECRET, waited_for(read, named, lacks), named)


def waited_for(
    read: Callable[[], T],
    named: str,
    lacks: str = "its file system does not answer: is it mounted from a server that is gone?",
) -> T:
    """Read what may not be there for long, in a thread, and log now and then what it ``lacks``.

    Raises what ``read`` raises, and :class:`SettingsError` after a minute.
    """

    def report(waited_s: float) -> None:
        _log.warning("waiting %d s (of %g) for %s: %s", waited_s, _LIMIT_S, named, lacks)

    try:
        return watched(read, report, "rdzv-etcd secret", _LIMIT_S)
    except TookTooLongError:
        raise SettingsError(f"{named} could not be read in {_LIMIT_S:g} s: {lacks}") from None
