"""One event-loop thread per process: counting, interruption, forks and interpreter exit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rdzv_etcd.runtime.loop_thread import THREAD_NAME, LoopHold
from tests.support.signals import handling


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture
def loop_thread() -> Iterator[LoopHold]:
    with LoopHold.acquire() as held:
        yield held


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


class Interruption(Exception):
    """What a signal handler raises, as torchrun's does."""


def test_all_holders_share_one_thread_and_the_last_release_ends_it() -> None:
    before = len(loop_threads())
    first = LoopHold.acquire()
    second = LoopHold.acquire()
    assert len(loop_threads()) == before + 1
    first.release()
    first.release()  # idempotent: it must not take the second holder's share
    assert second.run(double(1)) == 2
    second.release()
    assert len(loop_threads()) == before
    with LoopHold.acquire() as third:
        assert third.run(double(2)) == 4
    assert len(loop_threads()) == before


def test_a_released_hold_refuses_to_run() -> None:
    released = LoopHold.acquire()
    released.release()
    with pytest.raises(RuntimeError, match="released"):
        released.run(double(1))


def test_a_timeout_cancels_the_coroutine_and_waits_for_its_tidying(loop_thread: LoopHold) -> None:
    tidied = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        loop_thread.run(endless(), timeout_s=0.01)
    assert tidied == [True]


@pytest.mark.parametrize("raised", [Interruption, KeyboardInterrupt])
def test_an_exception_from_a_signal_handler_cancels_and_goes_on(
    loop_thread: LoopHold, raised: type[BaseException]
) -> None:
    started = threading.Event()
    tidied = []

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    def interrupt() -> None:
        started.wait(60)
        os.kill(os.getpid(), signal.SIGUSR1)

    def handler(number: int, frame: object) -> None:
        raise raised

    with handling(signal.SIGUSR1, handler):
        sender = threading.Thread(target=interrupt)
        sender.start()
        with pytest.raises(raised):
            loop_thread.run(endless())
        sender.join()
    assert tidied == [True]
    assert loop_thread.run(double(3)) == 6


def test_a_signal_that_does_not_wake_the_waiting_thread_is_handled_all_the_same(
    loop_thread: LoopHold,
) -> None:
    """So is one that comes between the last look for signals and the wait's beginning."""

    async def signal_this_thread() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        await asyncio.Event().wait()

    def handler(number: int, frame: object) -> None:
        raise Interruption

    with handling(signal.SIGUSR1, handler), pytest.raises(Interruption):
        loop_thread.run(signal_this_thread())


def test_only_the_main_thread_looks_for_signals(
    loop_thread: LoopHold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers run in no other; of 512 threads that looked each took the interpreter in turn."""
    monkeypatch.setattr("rdzv_etcd.process.SIGNAL_DELAY_S", 0.001)
    started = threading.Event()
    released = asyncio.Event()

    async def wait() -> None:
        started.set()
        await released.wait()

    async def release() -> None:
        released.set()

    waiting = threading.Thread(target=lambda: loop_thread.run(wait(), 60))
    waiting.start()

    def sleeps_through() -> bool:
        before = times_asleep(waiting)
        loop_thread.run(asyncio.sleep(0.1))
        return times_asleep(waiting) == before

    assert started.wait(60)
    try:
        assert any(sleeps_through() for _ in range(100))  # from when its wait has begun
    finally:
        loop_thread.run(release())
        waiting.join()


def times_asleep(thread: threading.Thread) -> int:
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
    return int(line.split()[1])


def test_the_last_release_frees_a_waiting_thread() -> None:
    loop_thread = LoopHold.acquire()
    started = threading.Event()
    errors: list[RuntimeError] = []

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop_thread.run(endless())
        except RuntimeError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert started.wait(60)
    loop_thread.release()
    waiter.join(60)
    assert [str(error) for error in errors] == [
        "the call was cancelled because its LoopHold was stopped"
    ]


def test_an_error_while_an_interrupted_call_tidies_up_is_logged(
    loop_thread: LoopHold, caplog: pytest.LogCaptureFixture
) -> None:
    async def clumsy() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("nobody waits for me")

    def handler(number: int, frame: object) -> None:
        raise Interruption

    with (
        handling(signal.SIGUSR1, handler),
        caplog.at_level(logging.ERROR),
        pytest.raises(Interruption),
    ):
        loop_thread.run(clumsy())
    assert "the interrupted call <coroutine object" in caplog.text
    assert "clumsy" in caplog.text
    assert "nobody waits for me" in caplog.text


def test_the_last_release_cancels_what_a_cancelled_task_has_begun() -> None:
    hold = LoopHold.acquire()
    ended = threading.Event()

    async def tidy_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            begun.append(asyncio.ensure_future(tidy_up()))
            await asyncio.sleep(0)

    async def start() -> None:
        begun.append(asyncio.ensure_future(work()))
        await asyncio.sleep(0)

    begun: list[asyncio.Task[None]] = []
    hold.run(start())
    hold.release()
    assert ended.is_set()
    assert all(task.done() for task in begun)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_what_would_end_a_program_ends_only_the_call_that_raised_it(
    loop_thread: LoopHold, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio lets these two end the loop."""
    started = threading.Event()
    released = asyncio.Event()

    async def wait() -> str:
        started.set()
        await released.wait()
        return "goes on"

    async def fail() -> None:
        released.set()
        raise raised("in the program's callback")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop_thread.run, wait(), 60)
        assert started.wait(60)
        with pytest.raises(raised, match="in the program's callback"):
            loop_thread.run(fail())
        assert waiting.result(60) == "goes on"
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert told.getMessage().startswith(f"{raised.__name__} was raised on the library's own thread")
    assert told.exc_info is not None


def test_a_callback_that_stops_its_threads_loop_does_not_stop_this_one(
    loop_thread: LoopHold,
) -> None:
    async def stop() -> None:
        asyncio.get_running_loop().stop()

    loop_thread.run(stop())
    assert loop_thread.run(double(4)) == 8


def test_what_would_end_a_program_does_not_keep_the_last_release_from_ending_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tidied = []
    tasks: list[asyncio.Task[None]] = []

    async def rude() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(3)

    async def polite() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            tidied.append(True)

    async def start() -> None:
        tasks.extend(map(asyncio.ensure_future, (rude(), polite())))
        await asyncio.sleep(0)

    with LoopHold.acquire() as hold:
        hold.run(start())
    assert tidied == [True]
    assert isinstance(tasks[0].exception(), SystemExit)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
