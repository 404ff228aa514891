"""A command on a real terminal: what it shows is read while it runs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from types import TracebackType

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``rdzv-etcd`` with these words, on a terminal of so many columns; killed at the end."""

    def __init__(self, *words: str, columns: int = 200) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            os.environ.pop("COLUMNS", None)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in background
            os.execv(sys.executable, [sys.executable, "-m", "rdzv_etcd", *words])
        self._raw = b""
        self._code: int | None = None

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    @property
    def text(self) -> str:
        """What was shown so far, without the terminal's escapes."""
        return _ESCAPE.sub("", self.raw)

    def wait_for(self, words: str, timeout_s: float = 120.0, after: int = 0) -> None:
        """Read until a pattern is shown behind the first ``after`` characters of :attr:`text`."""
        until_s = time.monotonic() + timeout_s
        while not re.search(words, self.text[after:]):
            if time.monotonic() > until_s or not self._read(until_s - time.monotonic()):
                raise AssertionError(f"{words!r} was not shown:\n{self.text[-8000:]}")

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def end(self, timeout_s: float = 120.0) -> int:
        """Read to the end, and return the exit code."""
        until_s = time.monotonic() + timeout_s
        while self._read(until_s - time.monotonic()):
            pass
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, timeout_s))
        if not ready:
            raise AssertionError(f"nothing more was shown:\n{self.text[-8000:]}")
        try:
            part = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self._raw += part
        return bool(part)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)
