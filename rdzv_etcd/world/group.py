"""One participant of one job, for launchers: joins its rounds, and ends it. Blocking.

The torch plugin is written on this module and :mod:`rdzv_etcd.world.world`, and on nothing else.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import DrainedError, EtcdUnavailableError, JobClosedError, MisuseError
from rdzv_etcd.etcd.first_contact import first_contact, wait_for_names
from rdzv_etcd.metrics import open_outputs, recorder_for
from rdzv_etcd.node.context import Identity
from rdzv_etcd.node.gate import Gate, GateFunction, check_gate
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.node.leave import why_interrupted
from rdzv_etcd.node.node import Node
from rdzv_etcd.peers.tcp import TcpPeers
from rdzv_etcd.process import refuse_after_fork
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Closure, Drain
from rdzv_etcd.runtime.listener import (
    Listener,
    LocalAddr,
    bind_beside,
    bind_listener,
    check_local_addr,
    loopback_problem,
    master_problem,
)
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Connection, Settings
from rdzv_etcd.settings.options import Orphans
from rdzv_etcd.text import shown
from rdzv_etcd.world.observer import JobEvents, begun
from rdzv_etcd.world.participation import (
    Connect,
    Participation,
    leave_all,
    open_etcd,
    warn_of_others,
)
from rdzv_etcd.world.world import World, WorldMember

__all__ = ["Group", "leave_all"]

_log = logging.getLogger("rdzv_etcd")


class Group:
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

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Connect | None = None,
        clock: Clock | None = None,
        gate: GateFunction | None = None,
    ) -> None:
        """``connect`` makes the connection to use instead of the one that the settings describe;
        the group closes it. ``gate`` is called before each arrival; raises
        :class:`~rdzv_etcd.errors.SettingsError` if it is not callable."""
        if gate is not None:
            check_gate(gate)
        self._settings = settings
        self._clock: Clock = clock if clock is not None else SystemClock()
        keys = JobKeys(settings.prefix, settings.job_id)
        self._world: weakref.ref[World] | None = None
        self._joining: dict[None, object] = {}
        """The join under way. A lock would do if no interruption could come between taking it and
        the ``try`` that gives it back; leaving this without being inside is nothing."""
        refuse_after_fork()
        recorder = recorder_for(settings)
        place = (str(settings.connection), keys)
        loop_thread = LoopHold.acquire()
        try:
            warn_of_others(place)
            self._embed()
            etcd = loop_thread.run(open_etcd(settings, connect))
        except BaseException:
            loop_thread.release()
            raise
        self._network = TcpPeers(settings.peer_silence_limit_s) if settings.peer_links else None
        self._node = Node(
            etcd, settings, make_identity(), self._clock, self._network, recorder=recorder
        )
        self._part = Participation(loop_thread, etcd, self._node, place)
        self._gate = Gate(self._node, gate)
        self._local_addr: LocalAddr | None = None
        self._drained: DrainedError | None = None
        self._finalizer = weakref.finalize(self, self._part.drop)
        self._finalizer.atexit = False  # then it leaves by itself, and waits for that
        try:
            self._start(settings.connection if connect is None else None)
            self._guard()
            bound = self._bind()
            self._part.reserve(bound)
            self._part.show_metrics(open_outputs(recorder, settings, bound.socket))
            if self._network is not None:
                self._network.listen_on(bind_beside(bound))
            if settings.job.max_nodes > 1:
                self._warn(loopback_problem(bound, settings.connection.endpoints))
        except BaseException:
            self.leave("could not start")
            raise

    def _embed(self) -> None:
        if self._settings.embed:
            from rdzv_etcd.embedded.start import ensure_etcd  # noqa: PLC0415 - only who embeds pays

            ensure_etcd(self._settings)

    def _guard(self) -> None:
        if self._settings.orphans is Orphans.KILL:
            from rdzv_etcd.orphans import Guard  # noqa: PLC0415 - only who asks for it pays

            self._part.be_guarded(Guard(self.node_id))

    def _start(self, connection: Connection | None) -> None:
        """``connection``: how etcd is reached, if it is as the settings say."""
        limit_s = self._settings.connection.connect_timeout_s
        if connection is not None:
            wait_for_names(connection, self._settings.timing.join_timeout_s)
        try:
            self._part.run(_start(self._node, limit_s, connection))
        except EtcdUnavailableError:
            if not self._settings.embed:
                raise
            # An embedded etcd that nobody used any more may have ended in this very moment.
            self._embed()
            self._part.run(_start(self._node, limit_s, connection))

    # -- taking part ------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job's id."""
        return self._settings.job_id

    @property
    def node_id(self) -> str:
        """This node's id, ``<host>~<pid>~<random>``: names the process, not only the host."""
        return self._node.context.identity.node_id

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
            except JobClosedError as error:
                if error.succeeded and not error.is_refused:
                    return
                raise
            except DrainedError:
                return
            yield world

    def join(self, timeout_s: float | None = None, *, because: str = "") -> World:
        """Arrive for the next round and block until it is formed with this node in it.

        ``because`` says why this node joins again, if it is the cause itself, such as how its
        worker failed. The others see it in :attr:`World.change`, in their logs and in the job's
        history, in one line of at most 200 characters.
        ``timeout_s`` (default: the settings' ``join_timeout_s``) bounds the wait for enough nodes,
        counted from when the round was opened if that is later; a spare of a healthy round waits
        for as long as that round lasts. After an error, blocks for up to ``close_timeout_s`` more
        to take its arrival back. Raises
        :class:`~rdzv_etcd.errors.JoinTimeoutError`, :class:`~rdzv_etcd.errors.JobClosedError`,
        :class:`~rdzv_etcd.errors.JobSettingsMismatchError`,
        :class:`~rdzv_etcd.errors.StateCorruptError`, :class:`~rdzv_etcd.errors.EtcdError`,
        :class:`~rdzv_etcd.errors.GateError` if this node does not pass its gate, which is checked
        first, :class:`~rdzv_etcd.errors.DrainedError` if it was drained, and has left now,
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if another thread leaves meanwhile, and
        :class:`~rdzv_etcd.errors.MisuseError` at once if another thread is joining already: a node
        arrives once per round.
        """
        try:
            with self._one_join() as listener:
                self._pass_gate()
                seat = self._part.run(self._arrive(listener, timeout_s, because))
                return self._enter(listener, seat)
        except DrainedError as error:
            self.leave(self._note_drained(error))
            raise

    def _pass_gate(self) -> None:
        if self._gate.begin():
            with self._node.call_ins.inside():
                failure = self._gate.ask()
            self._part.run(self._gate.settle(failure))

    def _note_drained(self, error: DrainedError) -> str:
        """Remember that this node was drained, and return the reason that the others see."""
        self._drained = DrainedError(str(error), by=error.by, reason=error.reason)  # not its frames
        return why_drained(Drain(error.by, error.reason), self.node_id)

    @contextmanager
    def _one_join(self, bound: Listener | None = None) -> Iterator[Listener]:
        """Refuse another join meanwhile; yield this one's socket, and close it if the join fails.

        An interruption that comes after the join was done leaves the world that it led to.
        ``bound``: a socket that the caller has made.
        """
        me, epoch, listener = object(), None, bound
        # No try within it: an interruption just as that begins would miss the outer one's end.
        try:
            self._begin_one_join(me)
            self._note_change()
            epoch = self._node.epoch
            listener = self._part.begin_join() or bound or self._bind()
            yield listener
        except BaseException as error:
            if listener is not None:
                listener.close()
            if epoch is not None:
                why = why_interrupted(error, "its join")
                self._part.begin(self._node.give_up_seat(joined_after=epoch, reason=why))
            raise
        finally:
            if self._joining.get(None) is me:
                self._joining.clear()

    def _begin_one_join(self, me: object) -> None:
        self._part.refuse_in_child()
        if self._drained is not None:
            raise self._drained.copy()
        if self._joining.setdefault(None, me) is not me:
            raise MisuseError(
                f"this node is joining job {self._settings.job_id!r} already: let one thread call "
                "join(), and share the world that it returns; another node is another group"
            )

    async def _arrive(self, listener: Listener, timeout_s: float | None, because: str) -> Seat:
        limit_s = seconds_or_none(timeout_s)
        if limit_s is None:
            limit_s = self._settings.timing.join_timeout_s
        return await self._node.join(listener.address, listener.port, limit_s, because)

    def _enter(self, listener: Listener, seat: Seat) -> World:
        part = self._part
        if seat.rank == 0:
            part.offer(listener, seat.epoch)
        else:
            listener.close()
        if seat.size > 1:
            self._warn(master_problem(seat.master_address, listener.address))
        world = World(self, part, seat)
        self._world = weakref.ref(world)
        return world

    def _note_change(self) -> None:
        """Let the world that this node leaves note why it was over, if it was."""
        world = None if self._world is None else self._world()
        if world is not None:
            world.change  # noqa: B018

    def _warn(self, problem: str | None) -> None:
        if problem is not None:
            _log.warning("[job %s] %s", self._settings.job_id, problem)

    def _bind(self) -> Listener:
        given = self._settings.local_addr
        if given is not None and self._local_addr is None:
            # Once: the name of a pod that is not ready at the moment may be gone from DNS.
            patience_s = self._settings.timing.join_timeout_s
            self._local_addr = check_local_addr(given, patience_s)
        return bind_listener(self._local_addr, self._settings.connection.endpoints)

    def drain(self, reason: str = "no reason given") -> None:
        """Let this node leave at the next safe point. Returns at once, and may be called anywhere,
        also in a signal handler. Idempotent; the first reason stays.

        This does not end the world: :attr:`World.should_yield` turns true on every member, so that
        all can leave their loop at the next commit point. Then this node's :meth:`join` leaves the
        job and raises :class:`~rdzv_etcd.errors.DrainedError`, and :meth:`worlds` ends; the others
        learn the reason and continue without it. A node that waits for a round leaves at once.
        """
        self._part.refuse_in_child()
        self._part.begin(self._node.be_drained(reason))

    @property
    def drain_reason(self) -> str | None:
        """Why this node is to leave, be it by :meth:`drain` or because an operator asked for it;
        ``None`` if it is not. From memory; for launchers that know a safe point of their own.
        Raises :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child."""
        self._part.refuse_in_child()
        self._node.call_ins.call_in()
        drain = self._node.drain
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
        self._node.call_ins.call_in()
        return self._node.waiting_count()

    def closure(self) -> Closure | None:
        """How the job ended, if it did; from memory. Before the first :meth:`join` this is the
        end of the last run, as long as its marker exists; a join begins a new run. Raises
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child."""
        self._part.refuse_in_child()
        return self._node.closure()

    # -- the job ----------------------------------------------------------------------------------

    def events(self) -> JobEvents:
        """Watch the job from now on: see :class:`~rdzv_etcd.JobEvents`.

        Any node can; in a job of many nodes let one do it, because each reader receives the events
        of every node. The events end when this node leaves. Blocks until the watch has begun, for a
        few times ``request_timeout`` at most. Raises
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if this node has left,
        :class:`~rdzv_etcd.errors.StateCorruptError`, and :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return begun(self._events())

    def _events(self) -> JobEvents:
        context = self._node.context
        watch = JobWatch(context.etcd, context.keys, context.clock)
        return JobEvents(self._part, watch, self._node.begin_watch)

    def report_dead(
        self, member: WorldMember | str, evidence: str, *, certain: bool = False
    ) -> bool:
        """Report that a member of the present world is dead, as a supervisor may know before its
        lease expires. Has the effect of a broken link between two nodes, also with
        ``peer_links=0``.

        ``member`` is one of ``world.members``, or a node id. ``evidence`` says in words what was
        seen; it appears in ``world.change`` and in the logs of all nodes. ``certain``: its process
        is known to be gone, not just silent. A member that lives and reaches etcd answers with one
        write, and nothing restarts; otherwise the job's leader declares it lost, after 0.03 s if
        the report is certain, else after 0.3 s, plus four times etcd's latency. The leader believes
        an uncertain report only after ``lease_ttl`` in contact with etcd itself.

        Returns whether the report stands in etcd. ``False``: the member is gone or was declared
        lost already, the world is another one, or a recent report of this node was wrong (it
        accuses the same member again only after a minute, and no member for a minute after three
        mistakes, which it logs at WARNING). Blocks for some requests; until the world is a second
        old (without links, a second and a third of ``lease_ttl``), since its members can answer
        only then; and until the member reported last has answered or was declared lost. Raises
        :class:`~rdzv_etcd.errors.MisuseError` for this node itself, for a node that is not a member
        of the present world, and for empty evidence;
        :class:`~rdzv_etcd.errors.RendezvousFailedError` if this node leaves, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._part.run(self._report_dead(member, evidence, certain=certain))

    async def _report_dead(
        self, member: WorldMember | str, evidence: str, *, certain: bool
    ) -> bool:
        node_id = member.node_id if isinstance(member, WorldMember) else member
        return await self._node.report_dead(node_id, evidence, certain=certain)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, reason: str = "the work is done") -> bool:
        """Close the job for all nodes, because its work is done: worlds are over, no node joins.

        For members, usually all of them at about the same time: members other than rank 0 first
        give rank 0 a second to do it. Returns whether the job is closed as far as this node knows;
        ``False`` if this node is not a member of the present round. Its requests take up to
        ``close_timeout_s`` each. Raises :class:`~rdzv_etcd.errors.RendezvousFailedError` if another
        thread leaves meanwhile, and :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._end(reason, succeeded=True, force=False)

    def fail(self, reason: str, *, force: bool = False) -> bool:
        """Close the job for all nodes, because it has failed; all of them get the reason.

        For members of the present round; with ``force`` for any node (before the first round there
        is nothing to close). Returns whether the job is closed as far as this node knows. Its
        requests take up to ``close_timeout_s`` each. Raises as :meth:`finish`.
        """
        return self._end(reason, succeeded=False, force=force)

    def _end(self, reason: str, *, succeeded: bool, force: bool) -> bool:
        return self._part.run(self._end_it(reason, succeeded=succeeded, force=force))

    async def _end_it(self, reason: str, *, succeeded: bool, force: bool) -> bool:
        await self._node.close_job(succeeded=succeeded, reason=reason, anyones=force)
        return self.closure() is not None

    def leave(self, reason: str = "left") -> None:
        """Leave the job at once and free everything; the others see it in one watch event.

        Blocks for at most ``close_timeout_s`` or a TTL, whichever is shorter, and for a few times
        that if this node was about to form the first round. Idempotent; waits for a call that is
        under way. If it is interrupted, the node leaves all the same. Does not raise if etcd cannot
        be reached: the lease expires by itself. On the library's own thread, where a ``__del__``
        method or a callback may run, it does not wait.
        """
        self._note_change()
        self._gate.abandon()
        self._part.leave(reason)

    def when_left(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once this node has left for any reason; at once if it has. A process
        that is killed does not call it.

        It runs on the library's own thread: it must not block, and an error that it raises there is
        only logged. Raises :class:`~rdzv_etcd.errors.MisuseError` if it is not callable, and
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
        """
        self._part.when_left(callback)

    def _begin_to_leave(
        self, reason: str, then: Callable[[], None], *, process_ends: bool = False
    ) -> bool:
        """Leave without blocking; ``then`` is called when that is done. ``False``: a child's.
        ``process_ends``: the process is about to end, whatever has become of its workers."""
        self._note_change()
        self._gate.abandon()
        if process_ends:
            self._part.forsake_workers()
        return self._part.begin_to_leave(reason, then)

    @property
    def has_left(self) -> bool:
        """Whether this process has no part in the job any more: the node has left, or belongs to
        the parent of this forked child."""
        return self._part.is_over

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(reason_after(kind))


async def _start(node: Node, limit_s: float, connection: Connection | None) -> None:
    # Not a method: the node may keep the error, and with its frames the group, which should leave.
    async with first_contact(connection):
        await node.start(limit_s)


def reason_after(error: type[BaseException] | None) -> str:
    """Why a node leaves at the end of a ``with`` block that ended with this error, or well."""
    return "left" if error is None else f"left after {error.__name__}"


def make_identity() -> Identity:
    """Return a new identity for this process: host name, pid, and something random."""
    host = shown(socket.gethostname(), 255).replace("~", "-").replace("/", "-") or "node"
    return Identity(f"{host}~{os.getpid()}~{secrets.token_hex(4)}", secrets.token_hex(4))
