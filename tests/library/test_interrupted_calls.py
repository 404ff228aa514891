"""Calls of all members that are interrupted or cancelled: they end their member's part."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd.aio import World as AioWorld
from rdzv_etcd.errors import WorldOverError
from rdzv_etcd.world.world import World
from tests.library.nodes import LIMIT_S, Job, at_once, join_all

_PACKAGE = str(Path(rdzv_etcd.__file__).parent)
_LAST_LINES = 12
"""So many of the last lines of a call in the library are tried: in these the result is there."""

pytestmark = [  # of a call that is interrupted before it has begun
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class _InterruptedError(BaseException):
    """As a signal handler may raise."""


def _at_line(number: int, call: Callable[[], object]) -> tuple[int, bool]:
    """Call, and raise at that line (0: at none) of the library in this thread; return how many
    lines it took, and whether it was interrupted."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                raise _InterruptedError
        return trace

    sys.settrace(trace)
    try:
        call()
    except _InterruptedError:
        return lines, True
    finally:
        sys.settrace(None)
    return lines, False


CALLS: dict[str, Callable[[World, bytes], object]] = {
    "barrier": lambda world, _: world.barrier("here", LIMIT_S),
    "exchange": lambda world, given: world.exchange(given, LIMIT_S),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_member_that_is_interrupted_has_left_the_world(name: str, job: Job) -> None:
    """Wherever that is: also when all is done but its result, which the others have got."""
    call = CALLS[name]
    with job.groups(2) as nodes, ThreadPoolExecutor(1) as pool:
        mine, other = join_all(nodes)

        def interrupted(line: int) -> tuple[int, bool]:
            given = f"{line}".encode()
            theirs = pool.submit(call, other, given)
            lines, was_interrupted = _at_line(line, lambda: call(mine, given))
            with suppress(WorldOverError):  # they have it only if it was done
                theirs.result(LIMIT_S)
            return lines, was_interrupted

        lines, _ = interrupted(0)
        at = range(lines - _LAST_LINES, lines + 1)
        for line in at:
            _, was_interrupted = interrupted(line)
            assert not was_interrupted or mine.wait_over(LIMIT_S), line
            assert mine.over is was_interrupted, line
            if was_interrupted:
                with pytest.raises(WorldOverError, match="was interrupted in"):
                    call(mine, b"again")
                assert other.wait_over(LIMIT_S)
                mine, other = join_all(nodes)
            values = at_once([lambda: mine.exchange(b"a"), lambda: other.exchange(b"b")])  # noqa: B023
            assert sorted(values[0]) == [b"a", b"b"]
            assert values[0] == values[1]


@pytest.mark.parametrize("name", CALLS)
def test_a_member_whose_call_was_cancelled_when_it_was_done_has_left_the_world(
    name: str, job: Job
) -> None:
    with job.groups(2) as nodes:
        mine, other = join_all(nodes)
        awaited = AioWorld(nodes[0], mine._part, mine._seat)

        async def cancelled() -> None:
            """Cancel a call whose result waits for this thread, which did not look."""
            call = (
                awaited.barrier("here", LIMIT_S)
                if name == "barrier"
                else awaited.exchange(b"mine", LIMIT_S)
            )
            with ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(CALLS[name], other, b"theirs")
                calling = asyncio.ensure_future(call)
                await asyncio.sleep(0)
                theirs.result(LIMIT_S)
                time.sleep(0.2)  # noqa: ASYNC251 - blocks the loop: nobody can tell it that the call is done
                calling.cancel()
                await asyncio.wait({calling})
                assert calling.cancelled()

        asyncio.run(cancelled())
        assert mine.wait_over(LIMIT_S)
        assert other.wait_over(LIMIT_S)
        again = join_all(nodes)
        at_once([partial(CALLS[name], world, b"again") for world in again])
