"""What goes wrong in a program's logging handlers and filters. Knows nothing of the library."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from types import TracebackType

_told: set[type[BaseException]] = set()


class _OnlyTold:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> bool:
        if error is None or not (isinstance(error, Exception) or _is_the_programs_own()):
            return False
        if logging.raiseExceptions and type(error) not in _told and sys.stderr:
            _told.add(type(error))
            with contextlib.suppress(Exception):  # it may be closed, or lead to logging itself
                print("--- rdzv_etcd: a logging handler or filter raised ---", file=sys.stderr)
                traceback.print_exception(error, file=sys.stderr)
        return True


def _is_the_programs_own() -> bool:
    """Whether a SystemExit or KeyboardInterrupt can only come from what was called in this thread:
    only the main thread runs signal handlers, whose exceptions go on."""
    return threading.get_ident() != threading.main_thread().ident


errors_only_told = _OnlyTold()
"""``with errors_only_told:`` around a logging call of the library's own tasks: what a handler or a
filter raises ends none of them. It is printed to standard error, as :mod:`logging` does with what
its own handlers meet: once for each type of exception, and not without ``logging.raiseExceptions``.
On the main thread a SystemExit or KeyboardInterrupt goes on: it may be a signal handler's.
"""
