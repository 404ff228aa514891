"""Gives up a node whose own thread hangs, so that the others do as well: gray failure.

The library's thread would renew the lease and answer on the links for as long as the process lives,
whatever became of the thread that works. When that has not called in for too long, the watchdog
accuses its own node, as another one would (:mod:`rdzv_etcd.protocol.liveness`), abandons the lease,
and answers on no link any more. When the thread is back, it finds that the others formed a world
without it, and may join again.

Only the time counts in which the library's own thread ran and looked: a process that was stopped as
a whole (SIGSTOP, a debugger, a paused machine) did not hang, and its lease shows what it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.node.accuse import put_accusation, read_place
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.peers import PeerNetwork
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, Control
from rdzv_etcd.protocol.world_end import waiting_count
from rdzv_etcd.world_change import how_wedged

_LOOKS = 8
_LONGEST_PERIOD_S = 1.0
_ACCUSATION_S = 5.0
"""How long etcd may take to record the accusation; the lease is abandoned in any case."""


def period_s(limit_s: float) -> float:
    """How often to look whether the thread has called in."""
    return min(_LONGEST_PERIOD_S, limit_s / _LOOKS)


@dataclass(frozen=True, slots=True)
class Silence:
    """For how long a thread has not called in, as far as was seen."""

    calls: int = 0
    """How often it had called in."""
    lasts_s: float = 0.0
    """For how long it has not since, while this process ran."""
    looked_s: float = 0.0
    """When the watchdog looked last, on the clock."""


def look(before: Silence, calls: int, now_s: float, limit_s: float, *, is_excused: bool) -> Silence:
    """Look at the thread once more, which has called in ``calls`` times by now.

    A look that comes late counts for nothing: whatever kept the library's thread from running, be
    it that the process was stopped, kept the other one from running too.
    """
    if is_excused or calls != before.calls:
        return Silence(calls, 0.0, now_s)
    passed_s = now_s - before.looked_s
    if passed_s > 2 * period_s(limit_s):
        passed_s = 0.0
    return Silence(calls, before.lasts_s + passed_s, now_s)


def is_on_duty(member: Member, control: Control) -> bool:
    """Whether a member has to call in: it works in a world that is not over.

    When that is over, the others wait for it for ``rejoin_timeout`` and no longer: its workers may
    have a checkpoint to write.
    """
    if member.phase is not Phase.MEMBER or member.closure is not None:
        return False
    return waiting_count(member, control) == 0


class CallIns:
    """How often the thread that owns a node has called in; written by it, read by the watchdog.

    The owner is the thread that joined last. Any call of the library counts, and while the thread
    waits inside one it need not do more. A program on asyncio does not wait in its thread, so its
    event loop is asked whether it still turns. Nothing here blocks or takes a lock.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        """The thread's number; ``None``: no thread has joined, or there are none (virtual time).
        """
        self.calls = 0
        self._inside: list[int] = []
        """The threads that wait inside of a call, once for each."""
        self._loops: list[asyncio.AbstractEventLoop] = []
        """Those that await something, once for each call."""

    def belong_to(self, thread: int) -> None:
        self.owner = thread
        self.calls += 1

    def call_in(self) -> None:
        """Note that this thread is at work, if it is the owner."""
        if self.owner is None or threading.get_ident() == self.owner:
            self.calls += 1

    @property
    def is_inside(self) -> bool:
        if self.owner is None:
            return bool(self._inside)
        return self.owner in self._inside

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """This thread waits inside of the library."""
        thread = threading.get_ident()
        self._inside.append(thread)
        try:
            yield
        finally:
            self._inside.remove(thread)
            self.call_in()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """A task of the running event loop awaits something of the library."""
        loops: list[asyncio.AbstractEventLoop] = []
        with contextlib.suppress(RuntimeError):  # a forked child has none, and is refused
            loops.append(asyncio.get_running_loop())
        self._loops.extend(loops)
        self.call_in()
        try:
            yield
        finally:
            for loop in loops:
                self._loops.remove(loop)
            self.call_in()

    def ask_loops(self) -> None:
        """Have every event loop call in that still turns."""
        for loop in set(self._loops):
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self.call_in)

    def stack(self) -> str:
        """The stack of the owner."""
        frame = None if self.owner is None else sys._current_frames().get(self.owner)
        if frame is None:
            return "the thread has ended"
        return "".join(traceback.format_stack(frame)).rstrip()


class Watchdog:
    """Looks after the thread that owns one node."""

    def __init__(
        self,
        context: NodeContext,
        member: Member,
        call_ins: CallIns,
        limit_s: float,
        network: PeerNetwork | None,
    ) -> None:
        """``limit_s``: the thread has to call in that often; ``network``: this node's links."""
        self._context = context
        self._member = member
        self._call_ins = call_ins
        self._limit_s = limit_s
        self._network = network
        self._abandoned = 0
        """The lease that the node has abandoned, until it is revoked: the accusation is on it."""

    async def run(self) -> None:
        """Look, until cancelled: there is no event when a thread does nothing."""
        context, call_ins, limit_s = self._context, self._call_ins, self._limit_s
        silence = Silence(call_ins.calls, 0.0, context.clock.now_s())
        while True:
            call_ins.ask_loops()
            if not self._member.evicted:
                await self.revoke_abandoned()
            await context.clock.sleep(period_s(limit_s))
            is_excused = call_ins.is_inside or not is_on_duty(self._member, context.control.view)
            silence = look(
                silence, call_ins.calls, context.clock.now_s(), limit_s, is_excused=is_excused
            )
            if silence.lasts_s >= limit_s:
                await self._give_up()

    async def _give_up(self) -> None:
        """Let the others continue without this node."""
        context, member = self._context, self._member
        how = how_wedged(self._limit_s)
        member.evicted = True
        context.wakeup.notify()
        context.log.error(
            f"this node is {how}; the others continue without it. That thread is at:\n"
            f"{self._call_ins.stack()}"
        )
        async with context.presence_lock:  # a join does not arrive meanwhile
            if not member.evicted:
                return  # its thread is back, and joins again already
            session = self._abandoned = context.session.lease_id
            context.session.lost(session)  # first: it must not claim the lead that it gives up
            try:
                await context.clock.wait_for(self._accuse(how, session), _ACCUSATION_S)
            except (EtcdError, TimeoutError) as error:
                context.log.info(f"could not report this node as hung, its lease will: {error}")
            finally:
                if self._network is not None and member.evicted:
                    self._network.disown()

    async def _accuse(self, how: str, session: int) -> None:
        context, node_id = self._context, self._member.node_id
        presence = (await read_place(context.etcd, context.keys, node_id)).presence
        if presence is not None and presence[0].lease_id == session:
            kv, info = presence
            accusation = Accusation(node_id, how, True, info.round_trip_ms)
            await put_accusation(context.etcd, context.keys, kv, accusation, session)

    async def revoke_abandoned(self) -> None:
        """Revoke the lease that the node has abandoned, if it has: it joins again, or leaves."""
        lease_id, self._abandoned = self._abandoned, 0
        if lease_id:
            with contextlib.suppress(EtcdError):  # then it ends by itself
                await self._context.etcd.revoke(
                    lease_id, timeout_s=self._context.leaving_limit_s / 2
                )
