"""The end of an agent's output: one line that says why, instead of dozens of a traceback.

Torchrun lets what a handler raises through, and Python prints torch's frames with it, up to 60
lines below the only one that matters. What a program catches keeps its traceback.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

_MARK = "__rdzv_etcd_says_all__"
_log = logging.getLogger("rdzv_etcd")


def without_traceback(error: E) -> E:
    """Return the error, which Python will print in one line if nobody catches it.

    At log level DEBUG it is printed as always, and so is it where the program has a
    ``sys.excepthook`` of its own.
    """
    setattr(error, _MARK, True)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _last_word
    return error


def _last_word(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not getattr(error, _MARK, False) or _log.isEnabledFor(logging.DEBUG):
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
