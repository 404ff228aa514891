"""The blocking face of a node: what launchers use, and what the torch plugin is built on."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.core.member import World
from rdzv_etcd.core.model import Closure
from rdzv_etcd.errors import EtcdUnavailableError, MisuseError, RendezvousFailedError
from rdzv_etcd.etcd.api import Etcd
from rdzv_etcd.etcd.forks import refuse_after_fork
from rdzv_etcd.group.barrier import Barriers
from rdzv_etcd.group.bootstrap import Bootstrap, bind_bootstrap, loopback_problem, master_problem
from rdzv_etcd.group.context import Identity
from rdzv_etcd.group.loop_thread import LoopHold
from rdzv_etcd.group.node import Node
from rdzv_etcd.group.participation import Participation, leave_all, warn_of_others
from rdzv_etcd.group.roster import members_of
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

__all__ = ["Group", "leave_all"]

_log = logging.getLogger("rdzv_etcd")

T = TypeVar("T")

Connect = Callable[[], "Etcd | Awaitable[Etcd]"]
"""Makes the connection to etcd, on the library's event loop; may be asynchronous."""


class Group:
    """One participant of one job.

    ::

        with Group(settings) as group:
            world = group.join()
            while working:
                if group.waiting_count():
                    world = group.join()

    The constructor connects, opens the session and begins to watch the job, so that :meth:`join` is
    one round trip plus the wait for the others. It blocks while names are resolved, and for at most
    ``settings.connection.connect_timeout_s`` when etcd does not answer; if etcd stops answering
    after that, for a few times ``request_timeout_s``. With ``settings.embed`` it first waits until
    an etcd is there, for up to ``join_timeout_s``. It raises
    :class:`~rdzv_etcd.errors.EtcdError`, :class:`~rdzv_etcd.errors.StateCorruptError` or, with
    ``settings.embed``, :class:`~rdzv_etcd.errors.EmbeddedEtcdError`; and
    :class:`~rdzv_etcd.errors.SettingsError` if ``local_addr`` cannot be an address of this node,
    :class:`OSError` if no port can be had, as :meth:`join` does.

    All methods may be called from any thread; :meth:`join` only when no other call of it is under
    way. A group that was not left leaves
    by itself when the interpreter exits or nobody refers to it any more. It belongs to the process
    that made it: in a forked child it raises :class:`~rdzv_etcd.errors.ForkedProcessError`, and so
    does a new group if the parent has used gRPC.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Connect | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``connect``: use this connection instead of the one that the settings describe, for
        instance ``lambda: EtcdClient.from_etcd3(my_client)``; it is closed with the group."""
        self._settings = settings
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._keys = JobKeys(settings.prefix, settings.job_id)
        self._world: World | None = None
        self._barriers: Barriers | None = None
        self._joining = threading.Lock()
        refuse_after_fork()
        place = (str(settings.connection), self._keys)
        warn_of_others(place)
        self._embed()
        self._loop_thread = LoopHold.acquire()
        try:
            self._etcd = self._loop_thread.run(self._open(connect))
        except BaseException:
            self._loop_thread.release()
            raise
        self._node = Node(self._etcd, settings, make_identity(), self._clock)
        self._part = Participation(self._loop_thread, self._etcd, self._node, place)
        self._finalizer = weakref.finalize(self, self._part.drop)
        self._finalizer.atexit = False  # then it leaves by itself, and waits for that
        try:
            self._start()
            bound = self._bind()
            self._part.reserve(bound)
            if settings.job.max_nodes > 1:
                self._warn(loopback_problem(bound, settings.connection.endpoints))
        except BaseException:
            self.leave("could not start")
            raise

    def _embed(self) -> None:
        if self._settings.embed:
            from rdzv_etcd.embedded import ensure_etcd  # noqa: PLC0415 - only who embeds pays

            ensure_etcd(self._settings)

    async def _open(self, connect: Connect | None) -> Etcd:
        if connect is not None:
            made = connect()
            return await made if isinstance(made, Awaitable) else made
        from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

        return EtcdClient(self._settings.connection)

    def _start(self) -> None:
        limit_s = self._settings.connection.connect_timeout_s
        try:
            self._loop_thread.run(self._node.start(limit_s))
        except EtcdUnavailableError:
            if not self._settings.embed:
                raise
            # An embedded etcd that nobody used any more may have ended in this very moment.
            self._embed()
            self._loop_thread.run(self._node.start(limit_s))

    # -- taking part ------------------------------------------------------------------------------

    def join(self, timeout_s: float | None = None) -> World:
        """Arrive for the next round and block until it is formed with this node in it.

        ``timeout_s`` (default: the settings' ``join_timeout_s``) bounds the wait for enough nodes,
        counted from when the round was opened if that is later; a spare of a healthy round waits
        for as long as that lasts. After an error it blocks for up to ``close_timeout_s`` more, to
        take its arrival back. Raises
        :class:`~rdzv_etcd.errors.JoinTimeoutError`, :class:`~rdzv_etcd.errors.JobClosedError`,
        :class:`~rdzv_etcd.errors.JobSettingsMismatchError`,
        :class:`~rdzv_etcd.errors.StateCorruptError`, :class:`~rdzv_etcd.errors.EtcdError`,
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if another thread leaves meanwhile, and
        :class:`~rdzv_etcd.errors.MisuseError` at once if another thread is joining already: a node
        has one place in a round, and the other call would take this one's arrival for its own.
        """
        if not self._joining.acquire(blocking=False):
            refuse_after_fork()
            raise MisuseError(
                f"this node is joining job {self._settings.job_id!r} already: let one thread call "
                "join(), and share the world that it returns; another node is another group"
            )
        try:
            return self._join(timeout_s)
        finally:
            self._joining.release()

    def _join(self, timeout_s: float | None) -> World:
        part = self._part
        bootstrap = part.begin_join() or self._bind()
        limit_s = self._settings.timing.join_timeout_s if timeout_s is None else timeout_s
        try:
            world = self._run(self._node.join(bootstrap.address, bootstrap.port, limit_s))
        except BaseException:
            bootstrap.close()
            raise
        if world.rank == 0:
            part.offer(bootstrap)
        else:
            bootstrap.close()
        if world.size > 1:
            self._warn(master_problem(world.master_address, bootstrap.address))
        self._world, self._barriers = world, Barriers(self._node, world)
        return world

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            _log.warning("[job %s] %s", self._settings.job_id, problem)

    def _bind(self) -> Bootstrap:
        return bind_bootstrap(self._settings.local_addr, self._settings.connection.endpoints)

    def members(self) -> tuple[str, ...]:
        """Return the node ids of this node's round, by rank.

        From memory; in a world of more than ``slice_nodes`` one read of etcd. Raises
        :class:`~rdzv_etcd.errors.MisuseError` before the first :meth:`join`,
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        world = self._world
        if world is None:
            raise MisuseError("there are no members yet: call join() first")
        return self._run(members_of(self._node.context, world))

    def take_listener(self) -> Bootstrap | None:
        """Hand rank 0 the socket listening on ``world.master_port``, once; the caller owns it."""
        return self._part.take_listener()

    def waiting_count(self) -> int:
        """How many nodes wait for a re-rendezvous; above zero: stop working and join again.

        Also above zero when a member was lost, when the others went on without this node, and when
        the job failed. Answers from memory: never blocks, never raises, whatever state etcd is in.
        """
        return self._node.waiting_count()

    def wait_change(self, timeout_s: float | None = None) -> bool:
        """Block until :meth:`waiting_count` is above zero; ``False`` after ``timeout_s``.

        Raises :class:`~rdzv_etcd.errors.RendezvousFailedError` if this node leaves meanwhile, or
        cannot go on.
        """
        try:
            self._run(self._changed(timeout_s))
        except TimeoutError:
            return False
        return True

    async def _changed(self, timeout_s: float | None) -> None:
        await self._clock.wait_for(self._node.changed(), timeout_s)

    def closure(self) -> Closure | None:
        """How the job was closed, if it was; from memory. Before the first :meth:`join` that is the
        end of the last run, while its marker stands: a join begins a new one."""
        return self._node.closure()

    def barrier(self, name: str, timeout_s: float = 300.0) -> None:
        """Block until every member of the round has called this with the same ``name``.

        A name that is used again is a new barrier. After ``timeout_s`` it blocks for up to some 10
        seconds more if etcd is slow to say who is missing. Raises
        :class:`~rdzv_etcd.errors.BarrierTimeoutError` (this node then does not count as being
        there; to call it again is to try again), :class:`~rdzv_etcd.errors.BarrierBrokenError` when
        the round changes meanwhile, :class:`~rdzv_etcd.errors.JobClosedError` when the job is
        closed, :class:`~rdzv_etcd.errors.MisuseError` before the first :meth:`join`,
        :class:`~rdzv_etcd.errors.EtcdError`; while etcd is away it waits on.
        """
        barriers = self._barriers
        if barriers is None:
            raise MisuseError("a barrier needs a round: call join() first")
        self._run(barriers.wait(name, timeout_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it; raises RendezvousFailedError if this group has left, or leaves meanwhile."""
        try:
            return self._loop_thread.run(work)
        except RuntimeError:
            if not self._part.has_left:
                raise
            # The loop thread was released before the work could end by itself.
            raise RendezvousFailedError("this node has left the job") from None

    # -- the end ----------------------------------------------------------------------------------

    def close(self, *, succeeded: bool, reason: str, anyones: bool = False) -> None:
        """Close the job for everybody, if this node is a member of its round; with ``anyones``
        whoever's round it is. :meth:`closure` tells whether that was done. Each of its requests may
        take ``close_timeout_s``; a member other than rank 0 first leaves that one a second to
        report a success. Raises :class:`~rdzv_etcd.errors.EtcdError`."""
        self._run(self._node.close_job(succeeded=succeeded, reason=reason, anyones=anyones))

    def leave(self, reason: str = "left") -> None:
        """End the session at once and free everything; the others see it in one watch event.

        Blocks for at most ``close_timeout_s`` or a TTL, whichever is shorter, and for a few times
        that if this node was about to form the first round. Idempotent; never raises because etcd
        is away (then the lease expires by itself).
        """
        self._finalizer.detach()
        self._part.leave(reason)

    @property
    def has_left(self) -> bool:
        return self._part.has_left

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave("left" if error is None else f"left after {kind.__name__ if kind else error}")

    # -- for stores on the same connection --------------------------------------------------------

    @property
    def node_id(self) -> str:
        return self._node.context.identity.node_id

    @property
    def etcd(self) -> Etcd:
        """The connection; use it on the library's event loop only."""
        return self._etcd

    async def round_over(self) -> None:
        """Await the end of the round (see :meth:`waiting_count`), on the library's event loop."""
        await self._node.changed()

    @property
    def keys(self) -> JobKeys:
        return self._keys

    @property
    def loop_thread(self) -> LoopHold:
        return self._loop_thread


def make_identity() -> Identity:
    """Return a new identity for this process: host name, pid, and something random."""
    host = shown(socket.gethostname(), 255).replace("~", "-").replace("/", "-") or "node"
    return Identity(f"{host}~{os.getpid()}~{secrets.token_hex(4)}", secrets.token_hex(4))
