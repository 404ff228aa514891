"""This process: its threads, its forks, also after a use of gRPC, its signals, and its workers."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import signal
import stat
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rdzv_etcd.errors import ForkedProcessError

SIGNAL_DELAY_S = 0.5
"""The main thread, which alone runs Python's signal handlers, looks this often whether there was a
signal while it waits. One that comes just before the wait begins, or to another thread, does not
interrupt it; only then is its handler called this late."""


class Latch:
    """Opens once; one thread waits for that, and a signal's handler may raise at any point of it.

    A ``threading.Event`` or a ``Future`` would not do: an exception that comes just when the
    waiting thread has taken their lock leaves it locked, and then no thread can set them.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = threading.Lock()  # a bare one: taken and waited for in one step
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """Let the waiter go. Idempotent; does not block."""
        self._is_open = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Block for at most ``timeout_s`` seconds (``None``: no limit); return whether it is open.

        Raises what signal handlers raise.
        """
        left_s = threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s)
        in_main_thread = threading.get_ident() == threading.main_thread().ident
        # Hundreds of other threads that looked as often would keep the interpreter to themselves.
        at_once_s = SIGNAL_DELAY_S if in_main_thread else threading.TIMEOUT_MAX
        while not (self._is_open or self._lock.acquire(timeout=min(left_s, at_once_s))):
            left_s -= at_once_s
            if left_s <= 0:
                return False
        return True


T = TypeVar("T")


def begun_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin ``work`` in a thread that the interpreter does not wait for at its end, unlike those of
    an executor. It cannot be cancelled."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_do, work, outcome), name=name, daemon=True).start()
    return outcome


def _do(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - raised to the caller
        outcome.set_exception(error)
        # The error's traceback keeps this frame, which must not keep the error in its turn.
        del outcome
    else:
        outcome.set_result(result)


def wait_for_result(outcome: Future[T], timeout_s: float) -> bool:
    """Block until it is done, for at most ``timeout_s``; return whether it is. Signal handlers run
    meanwhile, and what they raise is raised here."""
    latch = Latch()
    outcome.add_done_callback(lambda _: latch.open())
    return latch.wait(timeout_s)


def how_ended(exit_code: int) -> str:
    """Return how a process ended, as messages show it; a negative code is that of a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    known = {int(number): number.name for number in signal.Signals}
    return f"was killed by {known.get(-exit_code, f'signal {-exit_code}')}"


_id = os.getpid()


def process_id() -> int:
    """The id of this process, as :func:`os.getpid`."""
    return _id


_user: int | None = None
"""The process that used gRPC first, for this package."""


def _note_fork() -> None:
    global _id  # noqa: PLW0603 - there is one process
    _id = os.getpid()
    if _user is not None:
        # When the last of its objects is freed, grpc.aio waits for a thread that only the parent
        # has: forever, in a child whose garbage collector comes across what the parent has left.
        gc.freeze()


os.register_at_fork(after_in_child=_note_fork)


def note_use() -> None:
    """Call before gRPC opens anything. Raises :class:`ForkedProcessError`."""
    global _user  # noqa: PLW0603 - there is one gRPC in a process
    refuse_after_fork()
    _user = process_id()


def refuse_after_fork() -> None:
    """Raise :class:`ForkedProcessError` if this process was forked from one that has used gRPC."""
    if _user is not None and _user != process_id():
        raise ForkedProcessError(_user)


class WorkersNews:
    """What an agent's workers tell it: that they are in a world, or what keeps them from joining.

    They open its pipe by a path, as torch lets them inherit none. Where that leads elsewhere, as in
    another container, the agent has no news.
    """

    def __init__(self) -> None:
        self._pipe, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, _close, self._pipe, tell)
        self.address = f"/proc/{process_id()}/fd/{tell}", os.fstat(tell).st_ino
        """What workers need to tell it: a path, and the pipe that it has to lead to."""
        self.took_part = False
        """Whether one of them ever was in a world."""
        self.obstacle = ""
        """Why the last one that tried could not join, unless it has tried again since."""

    def read(self) -> None:
        """Take note of what is new. Does not block."""
        with contextlib.suppress(BlockingIOError):  # nothing is
            for line in os.read(self._pipe, _PIPE).decode(errors="replace").split("\n")[:-1]:
                is_in_a_world = line == IN_A_WORLD
                self.obstacle = "" if is_in_a_world else line
                self.took_part |= is_in_a_world


_PIPE = 1 << 16
IN_A_WORLD = "+"


def _close(*descriptors: int) -> None:
    for each in descriptors:
        os.close(each)


def tell_agent(address: tuple[str, int], line: str) -> None:
    """Tell the agent with this :class:`WorkersNews` in one line what keeps this process from
    joining; nothing if it is about to try; or ``IN_A_WORLD``. Does not block, and raises nothing.
    """
    path, inode = address
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(pipe)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode:
                os.write(pipe, f"{line}\n".encode())
        finally:
            os.close(pipe)


_SIG_DFL = 0
_LARGEST_SIGACTION = 512


def has_default_action(number: int) -> bool:
    """Return whether nothing in this process handles or ignores the signal."""
    return signal.getsignal(number) is signal.SIG_DFL and kernel_handler(number) in (_SIG_DFL, None)


def kernel_handler(number: int) -> int | None:
    """Return the address of the function that the kernel calls: the same one for all handlers in
    Python; 0 for the default action. ``None`` if it cannot be asked."""
    import ctypes  # noqa: PLC0415 - seldom needed

    found = ctypes.create_string_buffer(_LARGEST_SIGACTION)
    try:
        if ctypes.CDLL(None).sigaction(number, None, found) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return ctypes.c_size_t.from_buffer(found).value  # struct sigaction begins with the handler
