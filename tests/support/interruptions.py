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


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Call it, and raise :class:`Interrupted` in this thread just before the library's so-and-so
    many-th line; tell whether there was one, or ``False`` if the call was done before that."""
    left = line

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        if event == "line":
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
