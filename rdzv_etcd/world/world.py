"""A formed round as its member uses it: who is in it, and what they do together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn

from rdzv_etcd.arguments import Bytes, seconds_or_none
from rdzv_etcd.errors import MisuseError, RdzvEtcdError, RendezvousFailedError, StoreTimeoutError
from rdzv_etcd.names import display_name
from rdzv_etcd.node.leave import why_interrupted
from rdzv_etcd.node.node import Node
from rdzv_etcd.node.slices import members_of, presences_of
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.world.collectives import Collectives
from rdzv_etcd.world.participation import Participation
from rdzv_etcd.world.round_store import RoundStore
from rdzv_etcd.world.world_over import unless_over, until_closed
from rdzv_etcd.world_change import MovedOn, WorldChange


@dataclass(frozen=True, slots=True)
class Master:
    """Where rank 0 of a world is reached by the others."""

    address: str
    """A host name or an IP address."""
    port: int
    """Held open on rank 0 since before the world was formed: see :meth:`World.take_listener`."""


@dataclass(frozen=True, slots=True)
class WorldMember:
    """One member of a world."""

    rank: int
    node_id: str
    """``<host>~<pid>~<random>``: names the process, not only the host."""
    host: str
    """Its host's name."""
    address: str
    """Where the other members reach it: a host name or an IP address."""
    data: Mapping[str, object] = field(hash=False)
    """What it gave as ``data``; read-only, and ``dict(member.data)`` is a copy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", MappingProxyType(dict(self.data)))

    def __reduce__(self) -> tuple[type[WorldMember], tuple[object, ...]]:
        given = (self.rank, self.node_id, self.host, self.address, dict(self.data))
        return WorldMember, given


class World:
    """One formed round: a rank, a size, and what its members do together. Never changes; it gets
    over.

    All methods may be called from any thread.
    """

    def __init__(self, group: object, part: Participation, seat: Seat) -> None:
        """Made by :meth:`rdzv_etcd.Group.join`."""
        self._master = Master(seat.master_address, seat.master_port)
        self._group = group  # whoever works in a world takes part, also without the group
        self._part = part
        self._seat = seat
        self._collectives = Collectives(part.node, seat)
        self._change: WorldChange | None = None

    def __repr__(self) -> str:
        return (
            f"<World rank={self.rank} size={self.size} epoch={self.epoch} round={self.round} "
            f"master={self.master.address}:{self.master.port}>"
        )

    # -- its place in the job ---------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._seat.rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._seat.size

    @property
    def epoch(self) -> int:
        """Fencing token: grows from world to world of a job, through restarts and losses of etcd.
        Store it with what outlives the world, and refuse to overwrite what has a newer one."""
        return self._seat.epoch

    @property
    def round(self) -> int:
        """Counts the worlds of one run of the job, from 1; for people."""
        return self._seat.round

    @property
    def master(self) -> Master:
        """Where rank 0 is reached by the others."""
        return self._master

    # -- who is in it -----------------------------------------------------------------------------

    @cached_property
    def node_ids(self) -> tuple[str, ...]:
        """The members' node ids by rank.

        From memory; in a world of more than ``slice_nodes`` members the first use is one read of
        etcd, for up to ``request_timeout`` seconds. Raises :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._part.run(self._read_node_ids())

    def _read_node_ids(self) -> Coroutine[Any, Any, tuple[str, ...]]:
        return members_of(self._part.node.context, self._seat)

    @cached_property
    def members(self) -> tuple[WorldMember, ...]:
        """The members by rank, with what each gave as ``data``.

        The first use reads every member's presence: one read of etcd, and for up to a lease's TTL
        more if a member is putting its presence back just then. Raises
        :class:`~rdzv_etcd.errors.WorldOverError` if a member is gone,
        :class:`~rdzv_etcd.errors.JobClosedError` if the job was closed,
        :class:`~rdzv_etcd.errors.StateCorruptError` if somebody else wrote there, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._part.run(self._read_members())

    async def _read_members(self) -> tuple[WorldMember, ...]:
        node, seat = self._part.node, self._seat
        infos = await unless_over(
            node, seat, "the members", partial(presences_of, node.context, seat)
        )
        return tuple(
            WorldMember(rank, info.node_id, display_name(info.node_id), info.address, info.data)
            for rank, info in enumerate(infos)
        )

    # -- its end ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the members have to stop working in this world, or may; see :attr:`change`.

        From memory: never blocks, never raises, whatever state etcd is in, and costs microseconds.
        True in a forked child, which takes no part in it.
        """
        return self.change is not None

    @property
    def change(self) -> WorldChange | None:
        """Why this world is over, ``None`` while it is not; the first reason stays. As cheap as
        :attr:`over`."""
        self._part.node.call_ins.call_in()
        if self._change is None:
            part = self._part
            self._change = MovedOn() if part.is_foreign else part.node.change_of(self._seat)
        return self._change

    @property
    def should_yield(self) -> bool:
        """Whether to leave this world at the next commit point, where that costs nothing: it is
        over, or a member is to leave (see :meth:`rdzv_etcd.Group.drain`). As cheap as :attr:`over`;
        for loops that stop only there. Then join again; nobody has to.

        Newcomers make a world over, so they are no other case.
        """
        return self.over or self._part.node.should_yield(self._seat)

    def alive(self) -> None:
        """Tell the ``watchdog`` that this thread is at work; for work in which it calls nothing
        else of the library for long. As cheap as :attr:`over`. Raises
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child, whose life says nothing of
        its parent's."""
        self._part.refuse_in_child()
        self._part.node.call_ins.call_in()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Block until this world is over; ``False`` after ``timeout_s`` seconds.

        ``timeout_s=None``: no limit. It is over, too, when this node leaves or cannot go on.
        """
        limit_s = seconds_or_none(timeout_s)
        if not self.over:
            try:
                self._part.run(self._until_over(limit_s))
            except MisuseError:
                raise
            except (TimeoutError, RendezvousFailedError):
                pass
        return self.over

    async def _until_over(self, timeout_s: float | None) -> None:
        node = self._part.node
        await node.context.clock.wait_for(node.over(self._seat), timeout_s)

    # -- what its members do together -------------------------------------------------------------

    def barrier(self, name: str, timeout_s: float = 300.0) -> None:
        """Block until every member has called this with the same ``name``.

        A name of at most 1000 characters; one that is used again is a new barrier. Use few names
        again and again: what each leaves in etcd stays until the world is over. After ``timeout_s``
        seconds it blocks for up to some 10 seconds more if etcd does not answer.
        A call that timed out may be made again, and its member does not count as being there
        meanwhile; a call that was interrupted ends this member's part in the world: join again.
        Raises
        :class:`~rdzv_etcd.errors.BarrierTimeoutError`,
        :class:`~rdzv_etcd.errors.BarrierBrokenError` when the world gets over meanwhile,
        :class:`~rdzv_etcd.errors.JobClosedError` when the job is closed,
        :class:`~rdzv_etcd.errors.MisuseError` at once if another thread is at this barrier, and
        :class:`~rdzv_etcd.errors.EtcdError`; while etcd is away it waits on.
        """
        try:
            self._part.run(self._collectives.barrier(name, timeout_s))
        except BaseException as error:
            self._leave_if_interrupted(error, "a barrier")
            raise

    def exchange(self, data: Bytes, timeout_s: float = 300.0) -> list[bytes]:
        """Give every member these bytes; return what each has given, by rank, once all have.

        A barrier at which values change hands. The calls are counted: the first of every member
        belongs together, then the second. What one member gives must fit into one request to etcd
        (1.5 MiB by default), and all of them are read by all; etcd keeps those of two calls, and
        this member its own two, to put them again if etcd loses its data. Blocks for at most
        ``timeout_s`` seconds, and some seconds more to say who is missing. A call that timed out
        may be made again, and what was given first stands, for others may have it; a call that was
        interrupted ends this member's part in the world: join again. Raises
        :class:`~rdzv_etcd.errors.BarrierTimeoutError`,
        :class:`~rdzv_etcd.errors.WorldOverError` when the world gets over meanwhile,
        :class:`~rdzv_etcd.errors.JobClosedError` when the job is closed,
        :class:`~rdzv_etcd.errors.MisuseError` at once for what is no bytes, and if another thread
        is in an exchange of this world, :class:`~rdzv_etcd.errors.EtcdError`.
        """
        try:
            return self._part.run(self._collectives.exchange(data, timeout_s))
        except BaseException as error:
            self._leave_if_interrupted(error, "an exchange")
            raise

    def _leave_if_interrupted(self, error: BaseException, what: str) -> None:
        """Leave this world if it was not the call that raised ``error``: it may have been done just
        then, and its caller does not get to know. One that was not does this by itself."""
        if not isinstance(error, RdzvEtcdError):
            why = why_interrupted(error, what)
            self._part.begin(self._part.node.leave_world(self._seat, why))

    @cached_property
    def store(self) -> RoundStore:
        """The world's own key-value store; empty when the world begins, gone after it."""
        part, seat = self._part, self._seat
        keys = part.node.context.keys.store(seat.round, seat.run)
        unless = partial(unless_over, part.node, seat)  # it does not keep the world, nor the group
        return RoundStore(part.etcd, part, keys, seat.job_lease, unless_over=unless)

    def take_listener(self) -> Listener | None:
        """Hand rank 0 the socket that listens on ``master.port``, once; the caller owns it.

        ``None`` on every other rank, the second time, and once this node has joined again. Whoever
        wants to serve on the port without it closes it first. Raises
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
        """
        return self._part.take_listener(self.epoch)


def when_over(world: World, callback: Callable[[WorldChange | None], None]) -> None:
    """Have it called, with the reason, when :meth:`World.wait_over` would return: on the library's
    thread as a rule, so it must not block.

    Unlike a thread that waits, this keeps neither the world nor its group. Raises
    :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
    """
    part, seat = world._part, world._seat
    part.refuse_in_child()
    part.begin(_until_over(part.node, seat), lambda: callback(part.node.change_of(seat)))


def note_finished(world: World) -> None:
    """Tell the others that this member's work in the world is done and that no world has to wait
    for it any more, unless they finish at the same time. Returns at once; what happens in the world
    later does not concern its work. For launchers that wait for the others to finish."""
    part = world._part
    part.refuse_in_child()
    part.begin(part.node.finish_work(world._seat))


def wait_until_closed(world: World, timeout_s: float) -> NoReturn:
    """Wait until the job is closed, whatever becomes of the world before, and raise JobClosedError,
    or StoreTimeoutError if that takes longer."""
    part = world._part
    part.refuse_in_child()
    try:
        error = part.run(until_closed(part.node, "the end of the job"), timeout_s)
    except TimeoutError as late:
        raise StoreTimeoutError(f"the job was not closed within {timeout_s:g} s") from late
    raise error


async def _until_over(node: Node, seat: Seat) -> None:
    with suppress(RendezvousFailedError):
        await node.over(seat)
