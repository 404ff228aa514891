"""What a group holds until it leaves: its node, the connection, a hold on the loop, sockets.

Lets a node leave from any thread, and at the interpreter's exit. Has no reference to the group,
which could otherwise not be garbage collected.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rdzv_etcd.errors import (
    ForkedProcessError,
    MisuseError,
    RdzvEtcdError,
)
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.node.node import Node
from rdzv_etcd.process import process_id
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.runtime.lifecycle import Lifecycle
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

if TYPE_CHECKING:
    from rdzv_etcd.metrics.outputs import Outputs
    from rdzv_etcd.orphans import Guard

_log = logging.getLogger("rdzv_etcd")

T = TypeVar("T")

Connect = Callable[[], "Etcd | Awaitable[Etcd]"]
"""Makes the connection to etcd, on the library's event loop; may be asynchronous."""

_open: set[Participation] = set()


async def open_etcd(settings: Settings, connect: Connect | None) -> Etcd:
    """Make the connection that the settings describe, on the library's event loop."""
    if connect is not None:
        made = connect()
        return await made if isinstance(made, Awaitable) else made
    from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

    return EtcdClient(settings.connection)


class Participation(Lifecycle):
    """One node of this process, from its first contact with etcd until it has left."""

    ended = "this node has left the job"

    def __init__(
        self, loop_thread: LoopHold, etcd: Etcd, node: Node, place: tuple[str, JobKeys]
    ) -> None:
        """``place`` is the etcd and the job in it."""
        super().__init__(loop_thread)
        self.etcd = etcd
        self.node = node
        self.place = place
        self.bound: Listener | None = None
        """The socket for the first round; the later ones bind theirs when they begin."""
        self._listener: Listener | None = None
        """Rank 0's, until somebody takes it …"""
        self._listener_epoch = 0
        """… and of which world."""
        self.guard: Guard | None = None
        """Ends what this node has started if this process is gone without having left."""
        self._metrics: Outputs | None = None
        self.joined_in: int | None = None
        """The thread that joined last."""
        self._since_s = node.context.clock.now_s()
        self._process = process_id()
        self._when_left: list[Callable[[], None]] = []
        _open.add(self)
        loop_thread.if_it_fails(self._go_on_without_it)

    @property
    def is_over(self) -> bool:
        """Whether this process has no part any more: the node has left, or is a parent's."""
        return self.has_ended or self.is_foreign

    def refuse_in_child(self) -> None:
        """Raise ForkedProcessError in a forked child, for what does not wait for its outcome."""
        if self.is_foreign:
            raise ForkedProcessError(self._process)

    def reserve(self, bound: Listener) -> None:
        """Keep the socket for the first round."""
        self.bound = bound

    def be_guarded(self, guard: Guard) -> None:
        """End the guard when this node has left."""
        self.guard = guard

    def show_metrics(self, outputs: Outputs | None) -> None:
        """Close them when this node has left."""
        self._metrics = outputs

    def when_left(self, callback: Callable[[], None]) -> None:
        """See :meth:`rdzv_etcd.Group.when_left`."""
        self.refuse_in_child()
        if not callable(callback):
            raise MisuseError(
                f"the callback of when_left is {shown(repr(callback), 100)}; it must be callable "
                "without arguments"
            )
        self._when_left.append(callback)
        if self not in _open:
            self._tell_left()

    def _tell_left(self) -> None:
        while True:
            try:
                callback = self._when_left.pop(0)
            except IndexError:  # another thread may have taken the last one
                return
            try:
                callback()
            except BaseException as error:  # it is told of, and ends nothing
                if not (isinstance(error, Exception) or self.loop_thread.is_current):
                    raise  # at once, in the thread of who asked for it: that one's signal or exit
                _log.exception("the callback of when_left raised")

    def begin_join(self) -> Listener | None:
        """Note that this thread joins, and close the last round's listener if nobody took it.

        Returns the socket that was kept for the first round, once.
        """
        self.joined_in = threading.get_ident()
        self.node.call_ins.belong_to_this_thread()
        self._close_listener()
        bound, self.bound = self.bound, None
        return bound

    def offer(self, listener: Listener, epoch: int) -> None:
        """Keep rank 0's socket of that world until somebody takes it."""
        self._listener, self._listener_epoch = listener, epoch

    def take_listener(self, epoch: int) -> Listener | None:
        """Hand over rank 0's socket of that world, once. Raises ForkedProcessError in a child."""
        self.refuse_in_child()
        if epoch != self._listener_epoch:
            return None
        listener, self._listener = self._listener, None
        return listener

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def blocked(self) -> AbstractContextManager[object]:
        return self.node.call_ins.inside()

    def awaited(self) -> AbstractContextManager[object]:
        return self.node.call_ins.awaited()

    def keep(self, user: object) -> None:
        """Keep ``user`` alive until this node has left."""
        self.loop_thread.keep(user)

    def leave(self, reason: str) -> None:
        """End the session and free everything; see :meth:`rdzv_etcd.Group.leave`."""
        if self._note_leaving():
            self.last_work.run(partial(self._leave, reason))
            if self.loop_thread.has_failed:
                self._note_left()

    def begin_to_leave(self, reason: str, then: Callable[[], None] | None = None) -> bool:
        """Begin to leave without waiting for it; ``then`` is called, in some thread, when this node
        has left, be that by an earlier call.

        ``False`` in a forked child, which has nothing to end: ``then`` is not called.
        """
        if not self._note_leaving():
            return False
        self.last_work.begin(partial(self._leave, reason), then)
        if self.loop_thread.has_failed:
            self._note_left()
        return True

    def drop(self) -> None:
        """Begin to leave: may be called anywhere, by the garbage collector in the midst of
        anything."""
        self.begin_to_leave("was dropped by the program")

    def describe(self) -> str:
        """Return the node's id and its age, for display."""
        node = self.node.context
        return f"{node.identity.node_id}, for {node.clock.now_s() - self._since_s:.0f} s"

    def _note_leaving(self) -> bool:
        """Let nothing more begin here; tell whether there is a node to end, if that is not done."""
        self.has_ended = True
        self._close_listener()
        if self.bound is not None:
            self.bound.close()
        return not self.is_foreign

    async def _leave(self, reason: str) -> None:
        try:
            await self.node.leave(reason)
        finally:
            self._note_left()
            if self._metrics is not None:
                await self._metrics.close()
            await self.etcd.close()

    def _note_left(self) -> None:
        _open.discard(self)
        atexit.unregister(self.at_exit)
        if self.guard is not None:
            self.guard.end()
        self._tell_left()

    def forsake_workers(self) -> None:
        """Leave workers that still run to the guard, if there is one: the process ends, and nobody
        has made sure that there are none. torchrun forgets one that it starts just when a signal
        comes (torch 2.13)."""
        if not self.has_ended:
            self.guard = None

    def _go_on_without_it(self, error: BaseException) -> None:
        """The loop's thread has failed: nothing will be done on it any more."""
        self.node.fail("event loop", error)
        if self.has_ended:  # it was about to
            self._note_left()

    def at_exit(self) -> None:
        if self.is_foreign:
            return
        self.forsake_workers()
        try:
            self.leave(_why_the_process_ends())
        except RdzvEtcdError as error:
            _log.info("left without etcd's confirmation: %s", error)


def _why_the_process_ends() -> str:
    """Why this node leaves when the interpreter exits: with torch's agent because of a signal, as a
    rule."""
    error = getattr(sys, "last_value", None)  # what ends the program, but for a SystemExit
    if error is None or hasattr(sys, "ps1"):  # in a session, any error that it has shown
        return "the process ended"
    by = what_interrupted(error)
    return by if by in signal.Signals.__members__ else f"the process ended: {by or error!r}"


def warn_of_others(place: tuple[str, JobKeys]) -> None:
    """Warn if this thread has joined the job as another node already, which has not left.

    Such a node is usually left over from a run that was interrupted, and would be waited for.
    Nodes that nobody can reach any more leave now.
    """
    if _joined_here(place):
        gc.collect()
    for other in _joined_here(place):
        _log.warning(
            "this process already has a node in job %r, %s, and starts another one. If the earlier "
            "one is left over from an interrupted run, end it with rdzv_etcd.leave_all(%r)",
            place[1].job_id,
            other.describe(),
            place[1].job_id,
        )


def leave_all(job_id: str | None = None) -> None:
    """Let every node of this process leave, or all of one job; for what an interrupted run left.

    Blocks and raises as :meth:`rdzv_etcd.world.group.Group.leave`; one that fails to leave keeps no
    other from it.
    """
    with contextlib.ExitStack() as stack:  # it goes through all, and raises in the end
        for each in tuple(_open):
            if job_id in (None, each.place[1].job_id):
                stack.callback(each.leave, "left over")


def _joined_here(place: tuple[str, JobKeys]) -> list[Participation]:
    return [
        each
        for each in tuple(_open)
        if each.place == place and each.joined_in == threading.get_ident() and not each.is_over
    ]
