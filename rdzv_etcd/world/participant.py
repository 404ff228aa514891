"""One participant of a job: its node, the connection, a hold on the loop, sockets.

Both faces of a group are on it. Lets a node leave from any thread, and at the interpreter's exit.
Has no reference to a group, which could otherwise not be garbage collected.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    DrainedError,
    EtcdUnavailableError,
    ForkedProcessError,
    MisuseError,
    RdzvEtcdError,
)
from rdzv_etcd.etcd.first_contact import first_contact, wait_for_names
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.metrics import recorder_for, serve
from rdzv_etcd.node.context import Identity
from rdzv_etcd.node.gate import Gate
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.node.leave import why_interrupted
from rdzv_etcd.node.node import Node
from rdzv_etcd.peers.tcp import TcpPeers
from rdzv_etcd.process import process_id, refuse_after_fork
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Drain
from rdzv_etcd.runtime.lifecycle import Lifecycle
from rdzv_etcd.runtime.listener import (
    Listener,
    LocalAddr,
    bind_beside,
    bind_listener,
    check_local_addr,
    looks_up_names,
    loopback_problem,
    master_problem,
    still_found,
)
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.runtime.threads import in_thread
from rdzv_etcd.settings import Connection, Endpoint, Settings
from rdzv_etcd.settings.options import Orphans
from rdzv_etcd.text import shown

if TYPE_CHECKING:
    from rdzv_etcd.metrics.prometheus import Server
    from rdzv_etcd.orphans import Guard

_log = logging.getLogger("rdzv_etcd")

_SEATS_S = 5.0
"""How often a node looks after an embedded cluster's members on its machine."""

Connect = Callable[[], "Etcd | Awaitable[Etcd]"]
"""Makes the connection to etcd, on the library's event loop; may be asynchronous."""

_open: set[Participant] = set()


async def open_etcd(
    settings: Settings, connect: Connect | None, near: Collection[Endpoint] = ()
) -> Etcd:
    """Make the connection that the settings describe, on the library's event loop; ``near``: the
    endpoints on this machine, as far as that is known."""
    if connect is not None:
        made = connect()
        return await made if isinstance(made, Awaitable) else made
    from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

    readable = JobKeys(settings.prefix, settings.job_id).round
    make = partial(EtcdClient, settings.connection, near=near, readable=readable)
    return await in_thread(make, _nothing)  # a disk or a resolver may hang


class Participant(Lifecycle):
    """One node of this process, from its first contact with etcd until it has left."""

    ended = "this node has left the job"

    def __init__(self, settings: Settings, connect: Connect | None, clock: Clock) -> None:
        """Connect, and begin to watch the job; see :class:`rdzv_etcd.Group`."""
        refuse_after_fork()
        self.settings = settings
        recorder = recorder_for(settings)
        keys = JobKeys(settings.prefix, settings.job_id)
        self.place = (str(settings.connection), keys)
        """The etcd and the job in it."""
        loop_thread = LoopHold.acquire()
        try:
            warn_of_others(self.place)
            near = self._embed()
            self.etcd = loop_thread.run(open_etcd(settings, connect, near))
        except BaseException:
            loop_thread.release()
            raise
        self.network = TcpPeers(settings.peer_silence_limit_s) if settings.peer_links else None
        self.node = Node(
            self.etcd, settings, make_identity(), clock, self.network, recorder=recorder
        )
        super().__init__(loop_thread)
        self._gate = Gate(self.node)
        self._guard: Guard | None = None
        """Ends what this node has started if this process is gone without having left."""
        self._metrics: Server | None = None
        self._local_addr: LocalAddr | None = None
        self._found_address = ""
        self._bound: Listener | None = None
        """The socket for the first round; the later ones bind theirs when they begin."""
        self._listener: Listener | None = None
        """Rank 0's, until the program takes it …"""
        self._listener_epoch = 0
        """… and of which world."""
        self._joining: asyncio.Task[Any] | None = None
        """The join under way."""
        self._drained: DrainedError | None = None
        self.joined_in: int | None = None
        """The thread that joined last."""
        self._note_change: Callable[[], None] = _nothing
        self._since_s = clock.now_s()
        self._process = process_id()
        self._when_left: list[Callable[[], None]] = []
        _open.add(self)
        loop_thread.if_it_fails(self._continue_without_loop)
        try:
            self._start(settings.connection if connect is None else None)
        except BaseException:
            self.leave("could not start")
            raise

    def _embed(self) -> tuple[Endpoint, ...]:
        """Make sure that an embedded etcd serves; return the endpoints on this machine, if it has
        several."""
        if not self.settings.embed:
            return ()
        from rdzv_etcd.embedded import start  # noqa: PLC0415 - only who embeds pays

        start.ensure_etcd(self.settings)
        connection = self.settings.connection
        return start.endpoints_here(connection) if self.settings.embeds_cluster else ()

    def _start(self, connection: Connection | None) -> None:
        """``connection``: how etcd is reached, if it is as the settings say."""
        settings = self.settings
        if connection is not None:
            wait_for_names(connection, settings.timing.join_timeout_s)
        try:
            self.run(self._contact(connection))
        except EtcdUnavailableError:
            if not settings.embed:
                raise
            # An embedded etcd that nobody used any more may have ended in this very moment.
            self._embed()
            self.run(self._contact(connection))
        if settings.orphans is Orphans.KILL:
            from rdzv_etcd.orphans import Guard  # noqa: PLC0415 - only who asks for it pays

            self._guard = Guard(self.node_id)
        if settings.embeds_cluster:
            self.run(self._begin_to_keep_seats())
        bound = self._bound = self._bind()
        self._metrics = serve(self.node.context.recorder, settings, bound.socket)
        if self.network is not None:
            self.network.listen_on(bind_beside(bound))
        if settings.job.max_nodes > 1:
            self._warn(loopback_problem(bound, settings.connection.endpoints))

    async def _keep_seats(self) -> None:
        """Look after this machine's members of the embedded cluster, if it has any."""
        from rdzv_etcd.embedded.cluster_start import SeatKeeper  # noqa: PLC0415 - as above

        keeper = await in_thread(lambda: SeatKeeper(self.settings, os.environ), _nothing)
        while True:
            await self.node.context.clock.sleep(_SEATS_S)
            try:
                await in_thread(keeper.look, _nothing)
            except RuntimeError as error:  # too many threads: there may be fewer the next time
                _log.warning("nothing looks after the embedded cluster at the moment: %s", error)

    async def _begin_to_keep_seats(self) -> None:
        self.node.attend(self._keep_seats(), "embedded cluster")

    async def _contact(self, connection: Connection | None) -> None:
        async with first_contact(connection):
            await self.node.start(self.settings.connection.connect_timeout_s)

    def _bind(self) -> Listener:
        """Make a socket for the next round; blocks while names are resolved."""
        given = self.settings.local_addr
        if given is not None and self._local_addr is None:
            # Once: the name of a pod that is not ready at the moment may be gone from DNS.
            patience_s = self.settings.timing.join_timeout_s
            self._local_addr = check_local_addr(given, patience_s)
        bound = bind_listener(self._own_address(), self.settings.connection.endpoints)
        self._found_address = bound.address
        return bound

    def _own_address(self) -> LocalAddr | None:
        """The address that was given, or was found for an earlier round; ``None``: to be found.

        It is not looked for in each round: a host that is lost may have taken its name out of DNS,
        and a name server may take long to say so, while the others wait for a new world.
        """
        if self._local_addr is None and self._found_address:
            return still_found(self._found_address)
        return self._local_addr

    @property
    def _bind_blocks(self) -> bool:
        settings = self.settings
        if settings.local_addr is not None and self._local_addr is None:
            return True
        return looks_up_names(self._own_address(), settings.connection.endpoints)

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            _log.warning("[job %s] %s", self.settings.job_id, problem)

    @property
    def node_id(self) -> str:
        return self.node.context.identity.node_id

    @property
    def is_over(self) -> bool:
        """Whether this process has no part any more: the node has left, or is a parent's."""
        return self.has_ended or self.is_foreign

    def refuse_in_child(self) -> None:
        """Raise ForkedProcessError in a forked child, for what does not wait for its outcome."""
        if self.is_foreign:
            raise ForkedProcessError(self._process)

    def keep(self, user: object) -> None:
        """Keep ``user`` alive until this node has left."""
        self.loop_thread.keep(user)

    def new_watch(self) -> JobWatch:
        context = self.node.context
        return JobWatch(context.etcd, context.keys, context.clock)

    async def begin_watch(self, watch: JobWatch) -> None:
        await self.node.begin_watch(watch)

    # -- joining ----------------------------------------------------------------------------------

    def check_may_join(self) -> None:
        """Do what a join begins with in its caller's thread."""
        self.refuse_in_child()
        if self._drained is not None:
            raise self._drained.copy()
        self._note_change()

    async def join(self, thread: int, timeout_s: float | None, because: str) -> Seat:
        """Arrive for the next round; see :meth:`rdzv_etcd.Group.join`. ``thread``: the caller's."""
        if self._joining is not None:
            raise MisuseError(
                f"this node is joining job {self.settings.job_id!r} already: let one thread call "
                "join(), and share the world that it returns; another node is another group"
            )
        mine = self._joining = asyncio.current_task()
        node, listener, epoch = self.node, None, self.node.epoch
        limit_s = self.settings.timing.join_timeout_s if timeout_s is None else timeout_s
        self.joined_in = thread
        self._close_listener()
        try:
            listener, self._bound = self._bound, None
            if listener is None and self._bind_blocks:
                listener = await in_thread(self._bind, Listener.close)
            elif listener is None:
                listener = self._bind()
            await self._pass_gate()
            seat = await node.join(listener.address, listener.port, limit_s, because)
        except BaseException as error:
            if listener is not None:
                listener.close()
            if isinstance(error, asyncio.CancelledError):
                self._give_up_seat(epoch, error)
            if isinstance(error, DrainedError):
                self._drained = DrainedError(str(error), by=error.by, reason=error.reason)
                why = why_drained(Drain(error.by, error.reason), self.node_id)
                await self.end_here(partial(self.last_leave, why))
            raise
        finally:
            if self._joining is mine:
                self._joining = None
        if seat.rank == 0:
            self._listener, self._listener_epoch = listener, seat.epoch
        else:
            listener.close()
        if seat.size > 1:
            self._warn(master_problem(seat.master_address, listener.address))
        return seat

    async def _pass_gate(self) -> None:
        if self._gate.begin():
            try:
                failure = await in_thread(self._gate.ask, _nothing)
            except asyncio.CancelledError:
                self._gate.abandon()
                raise
            await self._gate.settle(failure)

    def give_up_join(self, error: BaseException, epoch: int | None) -> None:
        """Let this node join again after an interruption, on the loop; ``epoch``: of the world that
        the interrupted join led to, if it did."""
        if self._joining is not None and _is_being_cancelled(self._joining):  # not another call's
            self._joining = None
        if epoch is not None:
            self._close_listener()
            self._give_up_seat(epoch - 1, error)

    def _give_up_seat(self, joined_after: int, error: BaseException) -> None:
        why = why_interrupted(error, "its join")
        giving_up = self.node.give_up_seat(joined_after=joined_after, reason=why)
        self.node.attend(giving_up, "interrupted join")

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

    def enter(self, note_change: Callable[[], None]) -> None:
        """Be in a new world, which ``note_change`` lets note why it is over, if it is."""
        self._note_change = note_change

    # -- leaving ----------------------------------------------------------------------------------

    def leave(self, reason: str) -> None:
        """End the session and free everything; see :meth:`rdzv_etcd.Group.leave`."""
        self.end(partial(self.last_leave, reason))

    def drop(self) -> None:
        """Begin to leave: may be called anywhere, by the garbage collector in the middle of
        anything."""
        self.begin_to_end(partial(self.last_leave, "was dropped by the program"))

    def note_ending(self) -> None:
        self._note_change()
        self._gate.abandon()
        self._close_listener()
        if self._bound is not None:
            self._bound.close()

    async def last_leave(self, reason: str) -> None:
        """Do the last work."""
        try:
            await self.node.leave(reason)
        finally:
            self.note_ended()
            if self._metrics is not None:
                self._metrics.close()
            await self.etcd.close()

    def note_ended(self) -> None:
        _open.discard(self)
        atexit.unregister(self.at_exit)
        if self._guard is not None:
            self._guard.end()
        self._run_callbacks()

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
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while True:
            try:
                callback = self._when_left.pop(0)
            except IndexError:  # another thread may have taken the last one
                return
            try:
                callback()
            except BaseException as error:  # it is logged, and ends nothing
                if not (isinstance(error, Exception) or self.loop_thread.is_current):
                    raise  # at once, in the thread of who asked for it: that one's signal or exit
                _log.exception("the callback of when_left raised")

    def forsake_workers(self) -> None:
        """Leave workers that still run to the guard, if there is one: the process ends, and nothing
        has made sure that there are none. torchrun forgets one that it starts just when a signal
        comes (torch 2.13)."""
        if not self.has_ended:
            self._guard = None

    def _continue_without_loop(self, error: BaseException) -> None:
        """The loop's thread has failed: nothing will be done on it any more."""
        self.node.fail("event loop", error)
        if self.has_ended:  # it was about to
            self.note_ended()

    def at_exit(self) -> None:
        if self.is_foreign:
            return
        self.forsake_workers()
        try:
            self.leave(_why_the_process_ends())
        except RdzvEtcdError as error:
            _log.info("left without etcd's confirmation: %s", error)

    def describe(self) -> str:
        """Return the node's id and its age, for display."""
        age_s = self.node.context.clock.now_s() - self._since_s
        return f"{self.node_id}, for {age_s:.0f} s"


def _nothing(*_: object) -> None:
    pass


def _is_being_cancelled(task: asyncio.Task[Any]) -> bool:
    """Whether it was asked to end; ``True`` on Python 3.10, which does not show that."""
    cancelling = getattr(task, "cancelling", None)
    return cancelling is None or cancelling() > 0


def make_identity() -> Identity:
    """Return a new identity for this process: host name, pid, and something random."""
    host = shown(socket.gethostname(), 255).replace("~", "-").replace("/", "-") or "node"
    return Identity(f"{host}~{os.getpid()}~{secrets.token_hex(4)}", secrets.token_hex(4))


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


def _joined_here(place: tuple[str, JobKeys]) -> list[Participant]:
    return [
        each
        for each in tuple(_open)
        if each.place == place and each.joined_in == threading.get_ident() and not each.is_over
    ]
