"""One node: arrives, waits, is a member, comes back after an outage, leaves.

Drives the pure decisions of :mod:`rdzv_etcd.core` over etcd's port. Everything here runs on one
event loop; :mod:`rdzv_etcd.group.group` is the blocking face of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.core.changes import Recovery, decide_recovery, waiting_count
from rdzv_etcd.core.model import (
    Closure,
    Control,
    Leader,
    NodeInfo,
    Round,
    display_name,
    display_names,
)
from rdzv_etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    JobClosedError,
    JobSettingsMismatchError,
    JoinTimeoutError,
    LeaseExistsError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    RdzvEtcdError,
)
from rdzv_etcd.etcd.api import Etcd, GetResult, TxnResult
from rdzv_etcd.group.context import Identity, NodeContext
from rdzv_etcd.group.feed import Feed
from rdzv_etcd.group.leadership import Leadership
from rdzv_etcd.group.narrator import Narrator
from rdzv_etcd.group.pulse import Pulse
from rdzv_etcd.group.session import Session
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import control_after, control_from, nodes_from
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.settings import Settings

_RETRY_S = 0.5
_ROOM_FOR_RANK_0_S = 1.0


class Phase(Enum):
    """Where a node stands."""

    IDLE = "idle"
    WAITING = "waiting"
    MEMBER = "member"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class World:
    """A formed round, as one member sees it."""

    round: int
    rank: int
    size: int
    master_address: str
    master_port: int
    epoch: int
    """Fencing token: grows from round to round, survives every restart of etcd."""
    members: tuple[str, ...]
    """Node ids by rank."""
    job_lease: int


class Node:
    """One participant of one job; at most one join at a time."""

    def __init__(self, etcd: Etcd, settings: Settings, identity: Identity, clock: Clock) -> None:
        pulse = Pulse(clock)
        keys = JobKeys(settings.prefix, settings.job_id)
        timing = settings.timing
        self._context = NodeContext(
            identity,
            settings,
            keys,
            etcd,
            clock,
            pulse,
            Session(etcd, clock, pulse, timing.lease_ttl_s, timing.keep_alive_deadline_s),
            Feed(
                etcd,
                clock,
                pulse,
                request=requests.read_control(keys),
                build=lambda result: self._observe(control_from(keys, result)),
                fold=lambda control, batch: self._observe(
                    control_after(keys, control, batch.revision, batch.events)
                ),
            ),
            Narrator(settings.job_id, identity.name),
        )
        self._leadership = Leadership(self._context, lambda: self._is_active)
        self._phase = Phase.IDLE
        self._info: NodeInfo | None = None
        self._arrived_with = 0
        """The session of the last arrival; another one means: arrive again."""
        self._world: tuple[Round, int] | None = None
        """The record that this node works in, and its epoch."""
        self._evicted = False
        self._was_member = False
        self._closure: Closure | None = None
        """How the job ended; remembered, because the marker expires."""
        self._marker: Closure | None = None
        """The closed marker of an earlier run, if this node arrived while it stood."""
        self._presence_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    # -- what others ask ------------------------------------------------------------------------

    @property
    def context(self) -> NodeContext:
        return self._context

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def control(self) -> Control:
        return self._context.control.view

    def waiting_count(self) -> int:
        """How many nodes wait for a re-rendezvous; from memory, never raises or blocks."""
        if not self._tasks or self._world is None:
            return 0
        return waiting_count(self.control, self._world[0], self._evicted)

    def closure(self) -> Closure | None:
        """How the job was closed, if it was, as far as this node knows; from memory."""
        return self._closure

    async def changed(self) -> None:
        """Wait until this node's round is over (see :meth:`waiting_count`)."""
        while self.waiting_count() == 0:
            await self._context.pulse.wait()

    # -- start ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the session and begin to watch the job. Idempotent.

        Raises EtcdError, StateCorruptError.
        """
        if self._tasks:
            return
        timeout_s = self._context.settings.connection.request_timeout_s
        await self._context.session.open(timeout_s)
        await self._context.control.refresh(timeout_s)
        self._spawn(self._context.session.run(), "session")
        self._spawn(self._context.control.run(), "control")
        self._spawn(self._leadership.run(), "leadership")
        self._spawn(self._keep_job_lease(), "job-lease")
        self._spawn(self._heal(), "heal")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        node_id = self._context.identity.node_id
        self._tasks.append(asyncio.ensure_future(work))
        self._tasks[-1].set_name(f"rdzv-etcd {name} {node_id}")

    @property
    def _is_active(self) -> bool:
        return self._phase in (Phase.WAITING, Phase.MEMBER)

    def _observe(self, control: Control) -> Control:
        if control.closure is not None and not self._closed_before_us(control):
            self._closure = control.closure
            node_id = self._context.identity.node_id
            self._was_member = control.round is not None and node_id in control.round.members
        return control

    # -- join -----------------------------------------------------------------------------------

    async def join(self, address: str, port: int, timeout_s: float) -> World:
        """Arrive for the next round and wait until it is formed with this node in it.

        ``timeout_s`` bounds the wait for enough nodes, not the time as a spare of a formed round.
        Raises JoinTimeoutError, JobClosedError, JobSettingsMismatchError, StateCorruptError, and
        EtcdError if etcd cannot be reached for that long.
        """
        await self.start()
        context = self._context
        settings = context.settings
        if context.control.problem is not None:
            await context.control.refresh()  # it may have been mended meanwhile
        self._phase = Phase.WAITING
        self._evicted = False
        self._world = None
        self._arrived_with = 0
        self._info = NodeInfo(
            context.identity.node_id, address, port, 0, settings.job, settings.rank_key
        )
        deadline_s = context.clock.now_s() + timeout_s
        try:
            while True:
                world = self._admitted()
                if world is not None:
                    return world
                self._check_welcome()
                await self._check_not_late()
                if not self._arrived_with or self._arrived_with != context.session.lease_id:
                    await self._arrive(deadline_s)
                    continue
                if not await context.pulse.wait(deadline_s):
                    if self._is_spare():
                        deadline_s = context.clock.now_s() + timeout_s
                        continue
                    raise JoinTimeoutError(await self._timeout_message(timeout_s))
        except (RdzvEtcdError, asyncio.CancelledError):
            await self._withdraw()
            raise

    def _admitted(self) -> World | None:
        """Become a member if a round was formed for which this node had arrived."""
        control, info = self.control, self._info
        record = control.formed
        if record is None or info is None or not 0 < info.arrived_for <= record.number:
            return None
        rank = record.rank_of(info.node_id)
        if rank is None:
            return None
        self._phase = Phase.MEMBER
        self._world = (record, control.epoch)
        world = World(
            record.number,
            rank,
            record.size,
            record.master_address,
            record.master_port,
            control.epoch,
            record.members,
            record.job_lease,
        )
        self._context.narrator.say(
            f"round {record.number}: rank {rank} of {record.size}, "
            f"master {record.master_address}:{record.master_port}, epoch {control.epoch}"
        )
        return world

    def _check_welcome(self) -> None:
        """Raise if this node has no business here (any more)."""
        context, control = self._context, self.control
        if context.control.problem is not None:
            raise context.control.problem
        if self._closure is not None:
            raise self._closed_error(self._closure)
        if control.closure is not None and self._marker is None:
            self._marker = control.closure
            context.narrator.say(f"{self._closed_text(self._marker)}; waiting for a new run of it")
        mine = context.settings.job
        formed = control.formed
        if formed is not None:
            theirs, whose = formed.settings, "the job's"
        elif control.leader is not None:
            theirs, whose = control.leader.settings, f"{display_name(control.leader.node_id)}'s"
        else:
            return
        if theirs != mine:
            raise JobSettingsMismatchError(
                f"job {context.settings.job_id!r}: this node was started with {mine}, but "
                f"{whose} settings are {theirs}; start all nodes of a job with the same --nnodes"
            )

    async def _check_not_late(self) -> None:
        """Raise if this node waits alone although a job of this id ended ``closed_ttl_s`` ago.

        Whoever starts a job anew under the same id starts its nodes together; one that is still
        alone when the marker expires belongs to the run that ended.
        """
        context = self._context
        if self._marker is None or self.control.round is not None or not self._arrived_with:
            return
        marker, self._marker = self._marker, None
        nodes = await context.etcd.get(requests.read_nodes(context.keys))
        if nodes.count <= 1 < context.settings.job.min_nodes:
            raise self._closed_error(marker)

    def _closed_before_us(self, control: Control) -> bool:
        """Whether the closed marker is older than this node's first session: another run's."""
        first = self._context.session.first_revision
        return first is not None and control.round_revision <= first

    async def _arrive(self, deadline_s: float) -> None:
        context = self._context
        async with self._presence_lock:
            info, control = self._info, self.control
            if info is None:
                return
            info = self._info = replace(info, arrived_for=control.next_number)
            remaining_s = deadline_s - context.clock.now_s()
            if remaining_s <= 0:
                raise EtcdUnavailableError(
                    f"could not arrive for round {info.arrived_for} in time: etcd did not answer"
                )
            limit_s = min(remaining_s, context.settings.connection.request_timeout_s)
            try:
                session = await context.session.open(limit_s)
                result = await context.etcd.txn(
                    requests.arrive(context.keys, info, session, control.round_revision),
                    timeout_s=limit_s,
                    repeatable=True,
                )
            except LeaseNotFoundError:
                context.session.lost(context.session.lease_id)
                return
            except (EtcdUnavailableError, OutcomeUnknownError) as error:
                context.narrator.say(f"cannot reach etcd, trying on: {error}")
                await context.clock.sleep(_RETRY_S)
                return
            if result.succeeded:
                self._arrived_with = session
                claimed = result.results[1]
                if isinstance(claimed, TxnResult):
                    self._leadership.note(Leader(info.node_id, info.settings), claimed)
                context.narrator.say(f"arrived for round {info.arrived_for}, waiting for others")
                return
        self._take(result)

    def _take(self, result: TxnResult) -> None:
        """Adopt the control keys that came with a refused transaction, if they are news."""
        (got,) = result.results
        if isinstance(got, GetResult) and got.revision >= self.control.revision:
            self._context.control.adopt(control_from(self._context.keys, got))

    def _is_spare(self) -> bool:
        """Whether a healthy round is running and this node waits for a seat in the next one."""
        control = self.control
        formed = control.formed
        return formed is not None and control.open_change is None

    async def _withdraw(self) -> None:
        """Take the presence back; whoever saw this node waiting does not count on it any more."""
        if self._phase is Phase.WAITING:
            self._phase = Phase.IDLE
        self._info = None
        session = self._context.session
        self._arrived_with = 0
        if session.lease_id:
            with contextlib.suppress(EtcdError):  # then the session's end does it
                await asyncio.shield(
                    session.end(min(5.0, self._context.settings.timing.close_timeout_s))
                )

    # -- being a member -------------------------------------------------------------------------

    async def _keep_job_lease(self) -> None:
        """Renew the job's shared lease at a slow rate while this node is a member."""
        context = self._context
        period_s = context.settings.timing.job_ttl_s / 3
        while True:
            if self._phase is not Phase.MEMBER or self._world is None:
                await context.pulse.wait()
                continue
            with contextlib.suppress(EtcdError):  # the others renew it too; _heal covers its loss
                await context.etcd.keep_alive(self._world[0].job_lease)
            await context.clock.sleep(period_s + context.clock.jitter(period_s / 10))

    async def _heal(self) -> None:
        """Restore what an outage took: the session, the presence, the round record."""
        context = self._context
        while True:
            if not self._needs_healing():
                await context.pulse.wait()
                continue
            try:
                await self._heal_once()
            except EtcdError as error:
                context.narrator.say(f"coming back after an outage: {error}")
                await context.clock.sleep(_RETRY_S)
            except RdzvEtcdError:  # a corrupt record: reported by the feed, raised by the next join
                await context.clock.sleep(_RETRY_S)

    def _needs_healing(self) -> bool:
        if self._phase is not Phase.MEMBER or self._evicted or self._closure is not None:
            return False
        return self._context.session.lease_id == 0 or self.control.round is None

    async def _heal_once(self) -> None:
        context = self._context
        control = await context.control.refresh()
        async with self._presence_lock:
            if not self._needs_healing() or self._world is None or self._info is None:
                return
            world, epoch = self._world
            recovery = decide_recovery(control, world)
            if recovery is Recovery.REJOIN:
                self._evicted = True
                context.narrator.say(f"round {world.number} went on without this node; re-joining")
                context.pulse.beat()
                return
            session = await context.session.open()
            if recovery is Recovery.NOTHING:
                return
            info = replace(self._info, arrived_for=world.number)
            if recovery is Recovery.RECORD:
                await self._regrant_job_lease(world)
                restored = replace(world, epoch_fixed=epoch, epoch_base=max(world.epoch_base, 0))
                txn = requests.restore_record(context.keys, restored, info, session)
            else:
                txn = requests.restore_presence(context.keys, control, info, session)
            try:
                result = await context.etcd.txn(txn, repeatable=True)
            except LeaseNotFoundError:
                context.session.lost(session)
                return
            if not result.succeeded:
                self._take(result)
                await self._lose_quietly(session)
                return
            if self._phase is Phase.MEMBER:  # a join that began meanwhile arrives by itself
                self._arrived_with = session
            context.narrator.say(f"back in round {world.number} after an outage ({recovery.value})")
        await context.control.refresh()

    async def _lose_quietly(self, session: int) -> None:
        """Forget a session that carries no presence, so that the next attempt starts afresh."""
        self._context.session.lost(session)
        await self._context.etcd.revoke(session)

    async def _regrant_job_lease(self, world: Round) -> None:
        with contextlib.suppress(LeaseExistsError):
            await self._context.etcd.grant(
                self._context.settings.timing.job_ttl_s, lease_id=world.job_lease
            )

    # -- the end --------------------------------------------------------------------------------

    async def close_job(self, *, succeeded: bool, reason: str) -> None:
        """Put the closed marker, for ``closed_ttl_s``; only a member can. Raises EtcdError.

        Does nothing if the job is closed already or went on without this node.
        """
        if self._phase is not Phase.MEMBER or self._world is None:
            return
        context, world = self._context, self._world[0]
        if succeeded and world.rank_of(context.identity.node_id) != 0:
            # All members finish together; let one of them do it, and do it if it does not.
            until_s = context.clock.now_s() + _ROOM_FOR_RANK_0_S
            while self.control.closure is None and await context.pulse.wait(until_s):
                pass
        timeout_s = context.settings.timing.close_timeout_s
        until_s = context.clock.now_s() + timeout_s
        while not self._is_over(world) and context.clock.now_s() < until_s:
            control = self.control
            if control.round is None:
                await context.control.refresh(timeout_s)
                if self.control.round is None:
                    return
                continue
            await self._put_marker(control, control.round, succeeded, reason, timeout_s)

    def _is_over(self, world: Round) -> bool:
        control = self.control
        return control.closure is not None or (
            control.formed is not None and not control.formed.same_world(world)
        )

    async def _put_marker(
        self, control: Control, record: Round, succeeded: bool, reason: str, timeout_s: float
    ) -> None:
        context = self._context
        grant = await context.etcd.grant(context.settings.timing.closed_ttl_s, timeout_s=timeout_s)
        closure = Closure(context.identity.node_id, reason, succeeded, context.clock.wall_s())
        closed = replace(record, closure=closure)
        try:
            result = await context.etcd.txn(
                requests.close_job(context.keys, control, closed, grant.lease_id),
                timeout_s=timeout_s,
            )
        except OutcomeUnknownError:
            await context.control.refresh(timeout_s)
            return
        if result.succeeded:
            context.control.adopt(
                replace(self.control, round=closed, round_revision=result.revision)
            )
            context.narrator.say(f"closed the job: {reason}")
        else:
            self._take(result)
            await context.etcd.revoke(grant.lease_id, timeout_s=timeout_s)

    async def leave(self, reason: str) -> None:
        """Say good-bye, end the session, clear up if this was the last node. Idempotent.

        Bounded by ``close_timeout_s`` and by the lease's TTL: after that etcd has done it.
        """
        if self._phase is Phase.GONE:
            return
        self._phase, was = Phase.GONE, self._phase
        timing = self._context.settings.timing
        limit_s = min(timing.close_timeout_s, float(timing.lease_ttl_s))
        try:
            if self._tasks:
                await self._context.clock.wait_for(self._leave(reason, was, limit_s), limit_s)
        except (EtcdError, TimeoutError) as error:
            self._context.narrator.say(f"left without etcd's confirmation: {error}")
        finally:
            await self._stop_tasks()

    async def _leave(self, reason: str, was: Phase, limit_s: float) -> None:
        context = self._context
        async with self._presence_lock:
            session = context.session.lease_id
            if session and was is Phase.MEMBER and self._info is not None and not self._closure:
                if self._leadership.is_mine:
                    await self._leadership.hand_over(limit_s)
                else:
                    info = replace(self._info, leaving=reason)
                    await context.etcd.txn(
                        requests.say_goodbye(context.keys, info, session),
                        timeout_s=limit_s,
                        repeatable=True,
                    )
            await context.session.end(limit_s)
        control = self.control
        result = await context.etcd.txn(
            requests.put_out_the_light(context.keys, control), timeout_s=limit_s, repeatable=True
        )
        if not result.succeeded:
            self._take(result)
            if self.control.round_revision != control.round_revision:
                result = await context.etcd.txn(
                    requests.put_out_the_light(context.keys, self.control),
                    timeout_s=limit_s,
                    repeatable=True,
                )
        if result.succeeded and control.round is not None and control.round.job_lease:
            await context.etcd.revoke(control.round.job_lease, timeout_s=limit_s)

    async def _stop_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- messages -------------------------------------------------------------------------------

    def _closed_error(self, closure: Closure) -> JobClosedError:
        return JobClosedError(
            self._closed_text(closure),
            succeeded=closure.succeeded,
            was_member=self._was_member,
        )

    def _closed_text(self, closure: Closure) -> str:
        ago_s = max(0.0, self._context.clock.wall_s() - closure.wall_s)
        return (
            f"job {self._context.settings.job_id!r} was closed by {display_name(closure.by)}, "
            f"{ago_s:.0f} s ago: {closure.reason}"
        )

    async def _timeout_message(self, timeout_s: float) -> str:
        context, control = self._context, self.control
        needed = context.settings.job
        text = f"round {control.next_number} was not formed within {timeout_s:g} s: "
        try:
            result = await context.etcd.get(requests.read_nodes(context.keys), timeout_s=5.0)
            here = list(nodes_from(context.keys, result, 0.0).present)
        except RdzvEtcdError as error:
            return f"{text}etcd does not answer ({error})"
        return (
            f"{text}{len(here)} of at least {needed.min_nodes} nodes arrived "
            f"({display_names(sorted(here))})"
        )
