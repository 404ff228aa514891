"""What a signal's handler that raises does, at each line of the library in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import rdzv_etcd

_LIBRARY = str(Path(rdzv_etcd.__file__).parent)


class Interrupted(BaseException):
    """Stands for what a handler raises."""


def interrupted_at(step: int, call: Callable[[], object], kind: str = "line") -> bool:
    """Call it, and raise :class:`Interrupted` in this thread just before the library's so-and-so
    many-th line, or ``opcode``; tell whether there were so many."""
    left = step

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        frame.f_trace_opcodes = kind == "opcode"
        if event == kind:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False
