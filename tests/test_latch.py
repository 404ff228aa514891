"""Waits that signals' handlers may leave by an exception, wherever they are."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from rdzv_etcd.process import Latch


class Interruption(Exception):
    """As a handler raises it."""


def wait_interrupted(latch: Latch, step: int) -> bool:
    """Wait for it, and raise at this step of Python's; tell whether there are so many."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == step:
                raise Interruption
        return trace

    sys.settrace(trace)
    try:
        latch.wait(0.001)
    except Interruption:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interruption_at_any_step_of_a_wait_leaves_the_latch_usable() -> None:
    """An Event's lock stays locked at some of them, and then whoever sets it waits for ever."""
    step = 1
    latch = Latch()
    while wait_interrupted(latch, step):
        opening = threading.Thread(target=latch.open, daemon=True)
        opening.start()
        opening.join(60)
        assert not opening.is_alive(), f"step {step}"
        assert latch.wait(60), f"step {step}"
        step, latch = step + 1, Latch()
    assert step > 20
