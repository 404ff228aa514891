"""What goes wrong in a program's logging handlers and filters. Knows nothing of the library."""

from __future__ import annotations

import contextlib
import logging
import sys
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
        if not isinstance(error, Exception):
            return False
        if logging.raiseExceptions and type(error) not in _told and sys.stderr:
            _told.add(type(error))
            with contextlib.suppress(Exception):  # it may be closed, or lead to logging itself
                print("--- rdzv_etcd: a logging handler or filter raised ---", file=sys.stderr)
                traceback.print_exception(error, file=sys.stderr)
        return True


errors_only_told = _OnlyTold()
"""``with errors_only_told:`` around a logging call of the library's own tasks: what a handler or a
filter raises ends none of them. It is printed to standard error, as :mod:`logging` does with what
its own handlers meet: once for each type of exception, and not without ``logging.raiseExceptions``.
"""
