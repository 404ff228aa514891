"""A formed round as its member uses it: its members, and what they do together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from rdzv_etcd.arguments import Bytes, seconds_or_none
from rdzv_etcd.errors import MisuseError, RdzvEtcdError, RendezvousFailedError, StoreTimeoutError
from rdzv_etcd.names import display_name
from rdzv_etcd.node.leave import why_interrupted
from rdzv_etcd.node.node import Node
from rdzv_etcd.node.slices import members_of, presences_of
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.runtime.faces import Blocking, Call
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.world.collectives import Collectives
from rdzv_etcd.world.participant import Participant
from rdzv_etcd.world.round_store import AnyRoundStore, RoundStore
from rdzv_etcd.world.world_over import unless_over, until_closed
from rdzv_etcd.world_change import MovedOn, WorldChange

S = TypeVar("S", bound=AnyRoundStore)
"""The store of the same face."""


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


class AnyWorld(Generic[S]):
    """One formed round; see :class:`World`."""

    _part: Participant
    _store_class: type[S]

    def __init__(self, group: object, part: Participant, seat: Seat) -> None:
        """Made by :meth:`rdzv_etcd.Group.join`."""
        self._master = Master(seat.master_address, seat.master_port)
        self._group = group  # keeps this node in the job, also if the program drops the group
        self._part = part
        self._seat = seat
        self._collectives = Collectives(part.node, seat)
        self._change: WorldChange | None = None
        self._known_ids: tuple[str, ...] | None = None
        self._known_members: tuple[WorldMember, ...] | None = None
        part.enter(partial(_note_change, weakref.ref(self)))

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
        """Fencing token: grows from world to world of a job, also when etcd restarts or loses data.
        Store it with data that outlives the world, and refuse to overwrite data with a newer
        one."""
        return self._seat.epoch

    @property
    def round(self) -> int:
        """Counts the worlds of one run of the job, from 1; for display."""
        return self._seat.round

    @property
    def master(self) -> Master:
        """Where rank 0 is reached by the others."""
        return self._master

    # -- who is in it -----------------------------------------------------------------------------

    @Call
    async def _node_ids(self) -> tuple[str, ...]:
        if self._known_ids is None:
            self._known_ids = await members_of(self._part.node.context, self._seat)
        return self._known_ids

    @Call
    async def _members(self) -> tuple[WorldMember, ...]:
        if self._known_members is None:
            node, seat = self._part.node, self._seat
            read = partial(presences_of, node.context, seat)
            infos = await unless_over(node, seat, "the members", read)
            self._known_members = tuple(
                WorldMember(rank, info.node_id, display_name(info.node_id), info.address, info.data)
                for rank, info in enumerate(infos)
            )
        return self._known_members

    # -- its end ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the members are to stop working in this world; see :attr:`change`.

        From memory: never blocks, never raises in any state of etcd, and costs microseconds. True
        in a forked child.
        """
        return self.change is not None

    @property
    def change(self) -> WorldChange | None:
        """Why this world is over, ``None`` while it is not. The first reason stays. As cheap as
        :attr:`over`."""
        if self._change is None:
            part = self._part
            self._change = MovedOn() if part.is_foreign else part.node.change_of(self._seat)
        return self._change

    @property
    def should_yield(self) -> bool:
        """Whether to leave this world at the next commit point and join again: it is over, or a
        member is to leave (see :meth:`rdzv_etcd.Group.drain`). For loops that stop only where it
        costs no work. As cheap as :attr:`over`.
        """
        return self.over or self._part.node.should_yield(self._seat)

    @Call
    def wait_over(self, timeout_s: float | None = None) -> Coroutine[Any, Any, bool]:
        """Wait until this world is over; ``False`` after ``timeout_s`` seconds.

        ``timeout_s=None``: no limit. It is also over when this node leaves or its own tasks fail.
        """
        return self._wait_over(seconds_or_none(timeout_s))

    async def _wait_over(self, limit_s: float | None) -> bool:
        node = self._part.node
        if not self.over:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await node.context.clock.wait_for(node.over(self._seat), limit_s)
        return self.over

    @wait_over.if_failed
    def _over_without_the_node(self, error: RdzvEtcdError) -> list[bool]:
        has_left = isinstance(error, RendezvousFailedError) and not isinstance(error, MisuseError)
        return [self.over] if has_left or self.over else []

    # -- what its members do together -------------------------------------------------------------

    @Call
    async def barrier(self, name: str, timeout_s: float = 300.0) -> None:
        """Wait until every member has called this with the same ``name``.

        A name has at most 1000 characters; using it again makes a new barrier. Reuse a few names:
        each name leaves a key in etcd until the world is over. Waits for at most ``timeout_s``
        seconds, and up to about 10 seconds more if etcd does not answer; while etcd cannot be
        reached it keeps waiting. A call that timed out may be made again, and meanwhile this member
        does not count as waiting; a call that was interrupted ends this member's part in the world:
        join again. Raises
        :class:`~rdzv_etcd.errors.BarrierTimeoutError`, which names the missing members,
        :class:`~rdzv_etcd.errors.BarrierBrokenError` if the world ends meanwhile,
        :class:`~rdzv_etcd.errors.JobClosedError` if the job is closed,
        :class:`~rdzv_etcd.errors.MisuseError` at once if another thread waits at this barrier, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        await self._collectives.barrier(name, timeout_s)

    @barrier.if_interrupted
    async def _leave_in_a_barrier(self, error: BaseException, _: list[None]) -> None:
        await self._leave(why_interrupted(error, "a barrier"))

    @Call
    async def exchange(self, data: Bytes, timeout_s: float = 300.0) -> list[bytes]:
        """Give every member these bytes; return what each gave, by rank, once all have.

        An all-gather of small values. Calls are counted: the first calls of all members belong
        together, then the second ones. The value of one member must fit in one request to etcd
        (1.5 MiB by default), and every member reads all of them. etcd keeps the values of two
        calls. Waits for at most ``timeout_s`` seconds, and a few seconds more to find out which
        members are missing. A call that timed out may be made again; the value given first stands,
        because others may have read it. A call that was interrupted ends this member's part in the
        world: join again. Raises
        :class:`~rdzv_etcd.errors.BarrierTimeoutError`, which names the missing members,
        :class:`~rdzv_etcd.errors.WorldOverError` if the world ends meanwhile,
        :class:`~rdzv_etcd.errors.JobClosedError` if the job is closed,
        :class:`~rdzv_etcd.errors.MisuseError` at once if ``data`` is not bytes, or if another
        thread is in an exchange of this world, and :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return await self._collectives.exchange(data, timeout_s)

    @exchange.if_interrupted
    async def _leave_in_an_exchange(self, error: BaseException, _: list[list[bytes]]) -> None:
        await self._leave(why_interrupted(error, "an exchange"))

    async def _leave(self, why: str) -> None:
        """Leave this world after an interruption: the call may have been done just then, without
        its caller's knowing. A call that was cancelled on the loop leaves by itself."""
        await self._part.node.leave_world(self._seat, why)

    @cached_property
    def store(self) -> S:
        """The world's own key-value store; empty when the world begins, gone after it."""
        part, seat = self._part, self._seat
        keys = part.node.context.keys.store(seat.round, seat.run)
        unless = partial(unless_over, part.node, seat)  # it does not keep the world, nor the group
        return self._store_class(part.etcd, part, keys, seat.job_lease, unless_over=unless)

    def take_listener(self) -> Listener | None:
        """Return rank 0's socket that listens on ``master.port``, once; the caller owns it.

        ``None`` on every other rank, the second time, and once this node has joined again. To serve
        on the port with another socket, close this one first. Raises
        :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
        """
        return self._part.take_listener(self.epoch)


class World(Blocking, AnyWorld[RoundStore]):
    """One formed round: a rank, a size, and what its members do together. Its members never change:
    when they have to, the world is over.

    All methods may be called from any thread.
    """

    _store_class = RoundStore

    @cached_property
    def node_ids(self) -> tuple[str, ...]:
        """The members' node ids by rank.

        From memory; in a world of more than 128 members the first use is one read of etcd, for up
        to ``request_timeout`` seconds. Raises :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._node_ids()

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
        return self._members()


def _note_change(world: weakref.ref[AnyWorld[Any]]) -> None:
    known = world()
    if known is not None:
        known.change  # noqa: B018


def when_over(world: AnyWorld[Any], callback: Callable[[WorldChange | None], None]) -> None:
    """Call ``callback`` with the reason once :meth:`World.wait_over` would return, usually on the
    library's thread, so it must not block.

    Unlike a thread that waits, this keeps neither the world nor its group alive. Raises
    :class:`~rdzv_etcd.errors.ForkedProcessError` in a forked child.
    """
    part, seat = world._part, world._seat
    part.refuse_in_child()
    part.begin(_until_over(part.node, seat), lambda: callback(part.node.change_of(seat)))


def when_drained(world: AnyWorld[Any], callback: Callable[[], None]) -> None:
    """Call ``callback`` once this node is being drained; as :func:`when_over`."""
    part = world._part
    part.refuse_in_child()
    part.begin(_when_drained(part.node, callback))


def note_finished(world: AnyWorld[Any]) -> None:
    """Publish that this member's work in the world is done, so that no new world waits for it.
    Returns at once. For launchers that wait for the others to finish."""
    part = world._part
    part.refuse_in_child()
    part.begin(part.node.finish_work(world._seat))


def wait_until_closed(world: AnyWorld[Any], timeout_s: float) -> NoReturn:
    """Wait until the job is closed, whatever becomes of the world before, and raise JobClosedError,
    or StoreTimeoutError if that takes longer."""
    part = world._part
    part.refuse_in_child()
    try:
        error = part.run(until_closed(part.node, "the end of the job"), timeout_s)
    except TimeoutError as late:
        raise StoreTimeoutError(f"the job was not closed within {timeout_s:g} s") from late
    raise error


async def _when_drained(node: Node, callback: Callable[[], None]) -> None:
    with suppress(RendezvousFailedError):
        await node.drained()
    if node.drain is not None:  # it has not left, nor failed, for another reason
        callback()


async def _until_over(node: Node, seat: Seat) -> None:
    with suppress(RendezvousFailedError):
        await node.over(seat)
