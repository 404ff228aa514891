"""Calls whose effect is decided when their caller is interrupted or cancelled, and is not lost."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd.aio.world import World as AioWorld
from rdzv_etcd.group.world import World
from tests.library.nodes import LIMIT_S, at_once, groups, join_all, node_settings
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer

_PACKAGE = str(Path(rdzv_etcd.__file__).parent)
_LAST_LINES = 12
"""So many of the last lines of a call in the library are tried: in these the result is there."""

pytestmark = [  # of a call that is interrupted before it has begun
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class _InterruptedError(BaseException):
    """As a signal handler may raise."""


def _at_line(number: int, call: Callable[[], object]) -> int:
    """Call, and raise at that line (0: at none) of the library in this thread; return how many
    lines it took."""
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
        pass
    finally:
        sys.settrace(None)
    return lines


def test_a_member_that_is_interrupted_stays_in_step(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with (
        groups(node_settings(etcd_server, job_id, "2"), 2) as nodes,
        ThreadPoolExecutor(1) as pool,
    ):
        mine, other = join_all(nodes)

        def interrupted(
            name: str, call: Callable[[World, bytes], object], line: int
        ) -> tuple[int, list[object]]:
            """Interrupt my call at that line; return its lines, and what it returned, if it did."""
            got: list[object] = []
            given = f"{line}".encode()
            theirs = pool.submit(call, other, given)
            lines = _at_line(line, lambda: got.append(call(mine, given)))
            got = got or [call(mine, given)]
            assert got == [theirs.result(LIMIT_S)], name
            return lines, got

        calls: dict[str, Callable[[World, bytes], object]] = {
            "barrier": lambda world, _: world.barrier("here", LIMIT_S),
            "exchange": lambda world, given: world.exchange(given, LIMIT_S),
        }
        for name, call in calls.items():
            lines, _ = interrupted(name, call, 0)
            for line in range(lines - _LAST_LINES, lines + 1):
                _, got = interrupted(name, call, line)
                assert name == "barrier" or got == [[f"{line}".encode()] * 2]


def test_what_was_done_when_its_caller_was_cancelled_is_not_lost(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        mine, other = join_all(nodes)
        awaited = AioWorld(mine)

        async def cancelled(call: Any, others: Callable[[], object]) -> None:
            """Cancel a call whose result waits for this thread, which did not look."""
            with ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(others)
                calling = asyncio.ensure_future(call)
                await asyncio.sleep(0)
                theirs.result(LIMIT_S)
                time.sleep(0.2)  # noqa: ASYNC251 - blocks the loop: nobody can tell it that the call is done
                calling.cancel()
                await asyncio.wait({calling})
                assert calling.cancelled()

        async def main() -> None:
            await cancelled(
                awaited.exchange(b"a1", LIMIT_S), lambda: other.exchange(b"b1", LIMIT_S)
            )
            assert sorted(await awaited.exchange(b"again", LIMIT_S)) == [b"a1", b"b1"]
            await cancelled(awaited.barrier("x", LIMIT_S), lambda: other.barrier("x", LIMIT_S))
            await awaited.barrier("x", LIMIT_S)  # returns at once

        asyncio.run(main())
        values = at_once([lambda: mine.exchange(b"2"), lambda: other.exchange(b"2")])
        assert values == [[b"2", b"2"]] * 2
        at_once([lambda: mine.barrier("x", LIMIT_S), lambda: other.barrier("x", LIMIT_S)])
