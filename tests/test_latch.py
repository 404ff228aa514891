"""Waits that signals' handlers may leave by an exception, wherever they are."""

from __future__ import annotations

import functools
import threading

from rdzv_etcd.process import Latch
from tests.support.interruptions import interrupted_at


def test_an_interruption_at_any_step_of_a_wait_leaves_the_latch_usable() -> None:
    """An Event's lock stays locked at some of them, and then whoever sets it waits forever."""
    step = 1
    latch = Latch()
    while interrupted_at(step, functools.partial(latch.wait, 0.001), "opcode"):
        opening = threading.Thread(target=latch.open, daemon=True)
        opening.start()
        opening.join(60)
        assert not opening.is_alive(), f"step {step}"
        assert latch.wait(60), f"step {step}"
        step, latch = step + 1, Latch()
    assert step > 20
