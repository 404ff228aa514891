"""One participant of one job, for launchers: joins its rounds, and ends it.

The torch plugin is written on this module and :mod:`rdzv_etcd.world.world`, and on nothing else.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import DrainedError, JobClosedError, RendezvousFailedError
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.model import Closure
from rdzv_etcd.runtime.faces import Blocking, Call, LastCall
from rdzv_etcd.settings import Settings
from rdzv_etcd.world.observer import JobEvents, open_events
from rdzv_etcd.world.participant import Connect, Participant, leave_all
from rdzv_etcd.world.world import AnyWorld, World

__all__ = ["Group", "leave_all"]

W = TypeVar("W", bound=AnyWorld[Any])
"""The world of the same face."""


class AnyGroup(Generic[W]):
    """One participant of one job; see :class:`Group`."""

    _part: Participant
    _world_class: type[W]

    # -- taking part ------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job's id."""
        return self._part.settings.job_id

    @property
    def node_id(self) -> str:
        """This node's id, ``<host>~<pid>~<random>``: names the process, not only the host."""
        return self._part.node_id

    @Call
    def join(self, timeout_s: float | None = None, *, because: str = "") -> Coroutine[Any, Any, W]:
        """Arrive for the next round and wait until it is formed with this node in it.

        ``because`` says why this node joins again, if it is the cause itself, such as how its
        worker failed. The others see it in :attr:`World.change`, in their logs and in the job's
        history, in one line of at most 200 characters.
        ``timeout_s`` (default: the settings' ``join_timeout_s``) bounds the wait for enough nodes,
        counted from when the round was opened if that is later; a spare of a healthy round waits
        for as long as that round lasts. After an error, waits for up to ``close_timeout_s`` more
        to take its arrival back; so does a call that is interrupted or cancelled, for some two
        seconds, and the node may join again. Raises
        :class:`~rdzv_etcd.errors.JoinTimeoutError`, :class:`~rdzv_etcd.errors.JobClosedError`,
        :class:`~rdzv_etcd.errors.JobSettingsMismatchError`,
        :class:`~rdzv_etcd.errors.StateCorruptError`, :class:`~rdzv_etcd.errors.EtcdError`,
        :class:`~rdzv_etcd.errors.GateError` if this node does not pass its gate, which is checked
        first, :class:`~rdzv_etcd.errors.DrainedError` if it was drained, and has left now,
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if another thread leaves meanwhile, and
        :class:`~rdzv_etcd.errors.MisuseError` at once if another thread is joining already: a node
        arrives once per round.
        """
        self._part.check_may_join()
        return self._join(threading.get_ident(), seconds_or_none(timeout_s), because)

    async def _join(self, thread: int, limit_s: float | None, because: str) -> W:
        seat = await self._part.join(thread, limit_s, because)
        return self._world_class(self, self._part, seat)

    @join.if_interrupted
    async def _give_up_join(self, error: BaseException, worlds: list[W]) -> None:
        self._part.give_up_join(error, worlds[0].epoch if worlds else None)

    def drain(self, reason: str = "no reason given") -> None:
        """Let this node leave at the next safe point. Returns at once, and may be called anywhere,
        also in a signal handler. Idempotent; the first reason stays.

        This does not end the world: :attr:`World.should_yield` turns true on every member, so that
        all can leave their loop at the next commit point. Then this node's :meth:`join` leaves the
        job and raises :class:`~rdzv_etcd.errors.DrainedError`, and :meth:`worlds` ends; the others
        learn the reason and continue without it. A node that waits for a round leaves at once.
        """
        self._part.refuse_in_child()
        self._part.begin(self._part.node.be_drained(reason))

    @property
    def drain_reason(self) -> str | None:
        """Why this node is to leave, be it by :meth:`drain` or because an operator asked for it;
        ``None`` if it is not. From memory; for launchers that know a safe point of their own.
        Raises :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child."""
        self._part.refuse_in_child()
        drain = self._part.node.drain
        return None if drain is None else why_drained(drain, self.node_id)

    def waiting_count(self) -> int:
        """Above zero if this node is to stop working and join again, as torch's agent asks;
        :attr:`World.over` is the same question.

        Above zero if nodes wait that the next world would include, if a member was lost, if the
        others formed a world without this node, and if the job failed; zero if it was finished.
        The number is how many nodes waited or were lost when the world ended, at least 1; it does
        not change as more arrive. Answers from memory: never blocks, and never raises in any state
        of etcd, except :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
        """
        self._part.refuse_in_child()
        return self._part.node.waiting_count()

    def closure(self) -> Closure | None:
        """How the job ended, if it did; from memory. Before the first :meth:`join` this is the
        end of the last run, as long as its marker exists; a join begins a new run. Raises
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child."""
        self._part.refuse_in_child()
        return self._part.node.closure()

    # -- the end ----------------------------------------------------------------------------------

    @Call
    async def finish(self, reason: str = "the work is done") -> bool:
        """Close the job for all nodes, because its work is done: worlds are over, no node joins.

        For members, usually all of them at about the same time: members other than rank 0 first
        give rank 0 a second to do it. Returns whether the job is closed as far as this node knows;
        ``False`` if this node is not a member of the present round. Its requests take up to
        ``close_timeout_s`` each. Raises :class:`~rdzv_etcd.errors.RendezvousFailedError` if another
        thread leaves meanwhile, and :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return await self._end(reason, succeeded=True, force=False)

    @Call
    async def fail(self, reason: str, *, force: bool = False) -> bool:
        """Close the job for all nodes, because it has failed; all of them get the reason.

        For members of the present round; with ``force`` for any node (before the first round there
        is nothing to close). Returns whether the job is closed as far as this node knows. Its
        requests take up to ``close_timeout_s`` each. Raises as :meth:`finish`.
        """
        return await self._end(reason, succeeded=False, force=force)

    async def _end(self, reason: str, *, succeeded: bool, force: bool) -> bool:
        await self._part.node.close_job(succeeded=succeeded, reason=reason, anyones=force)
        return self.closure() is not None

    @LastCall
    async def leave(self, reason: str = "left") -> None:
        """Leave the job at once and free everything; the others see it in one watch event.

        Waits for at most ``close_timeout_s`` or a TTL, whichever is shorter, and for a few times
        that if this node was about to form the first round. Idempotent; waits for a call that is
        under way. If it is interrupted
        or cancelled, the node leaves all the same. Does not raise if etcd cannot
        be reached: the lease expires by itself. On the library's own thread, where a ``__del__``
        method or a callback may run, it does not wait.
        """
        await self._part.last_leave(reason)

    def when_left(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once this node has left for any reason; at once if it has. A process
        that is killed does not call it.

        It runs on the library's own thread: it must not block, and an error that it raises there is
        only logged. Raises :class:`~rdzv_etcd.errors.MisuseError` if it is not callable, and
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
        """
        self._part.when_left(callback)

    @property
    def has_left(self) -> bool:
        """Whether this process has no part in the job any more: the node has left, or belongs to
        the parent of this forked child."""
        return self._part.is_over


class Group(Blocking, AnyGroup[World]):
    """One participant of one job; :func:`rdzv_etcd.connect` makes one.

    ::

        with rdzv_etcd.connect("etcd-host:2379", job="my-job", nodes=(2, 4)) as group:
            for world in group.worlds():
                while not world.over:
                    work(world.rank, world.size)

    The constructor connects, opens the session and begins to watch the job, so that :meth:`join` is
    one round trip plus the wait for the others. It blocks while names are resolved, for up to
    ``join_timeout_s`` while ``local_addr`` or every endpoint is a name that is not in DNS yet, and
    for at most ``settings.connection.connect_timeout_s`` if etcd does not answer; if etcd stops
    answering after that, for a few times ``request_timeout_s``. With ``settings.embed`` it first
    waits until an etcd is there, for up to ``join_timeout_s``. Raises
    :class:`~rdzv_etcd.errors.EtcdError`, :class:`~rdzv_etcd.errors.StateCorruptError` or, with
    ``settings.embed``, :class:`~rdzv_etcd.errors.EmbeddedEtcdError`; and, as :meth:`join` does,
    :class:`~rdzv_etcd.errors.SettingsError` if ``local_addr`` cannot be an address of this node and
    :class:`OSError` if no port is free.

    All methods may be called from any thread, :meth:`join` only while no other call of it runs. A
    group leaves by itself when the interpreter exits, and when nothing refers to it or its world
    any more. It belongs to the process that made it: in a forked child it raises
    :class:`~rdzv_etcd.errors.ForkedProcessError`, and so does a new group if the parent has used
    gRPC.
    """

    _world_class = World

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Connect | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``connect`` makes the connection to use instead of the one that the settings describe;
        the group closes it."""
        self._part = Participant(settings, connect, clock or SystemClock())
        self._finalizer = weakref.finalize(self, self._part.drop)
        self._finalizer.atexit = False  # then it leaves by itself, and waits for that

    def worlds(self) -> Iterator[World]:
        """Join, and join again after each change, until the job is finished.

        Each pass of the loop is one world, and the next pass joins again: so let the body of the
        loop end when its world is over, or after a failure that the next world may not have.
        (Joining again while a world is not over ends it for the others, too.) The loop ends when
        the job is finished by any node, and when this node was drained. Blocks and raises as
        :meth:`join`, so the loop ends with :class:`~rdzv_etcd.errors.JobClosedError` if the job
        failed.
        """
        while True:
            try:
                world = self.join()
            except RendezvousFailedError as error:
                if is_good_end(error):
                    return
                raise
            yield world

    def events(self) -> JobEvents:
        """Watch the job from now on: see :class:`~rdzv_etcd.JobEvents`.

        Any node can; in a job of many nodes let one do it, because each reader receives the events
        of every node. The events end when this node leaves. Blocks until the watch has begun, for a
        few times ``request_timeout`` at most. Raises
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if this node has left,
        :class:`~rdzv_etcd.errors.StateCorruptError`, and :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return open_events(self._part)

    def _begin_to_leave(self, reason: str, then: Callable[[], None]) -> bool:
        """Leave without blocking, as the process is about to end, whatever has become of its
        workers; ``then`` is called when that is done. ``False``: a child's."""
        self._part.forsake_workers()
        return self._part.begin_to_end(partial(self._part.last_leave, reason), then)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(reason_after(kind))


def reason_after(error: type[BaseException] | None) -> str:
    """Why a node leaves at the end of a ``with`` block that ended with this error, or well."""
    return "left" if error is None else f"left after {error.__name__}"


def is_good_end(error: RendezvousFailedError) -> bool:
    """Whether a loop over the worlds of a job ends without an error: the job is finished, or this
    node was drained."""
    if isinstance(error, JobClosedError):
        return error.succeeded
    return isinstance(error, DrainedError)
