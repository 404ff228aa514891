"""Joining: arrives, waits for the round, gives up with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import math

from rdzv_etcd.core.model import (
    Closure,
    Leader,
    NodeInfo,
    Round,
    display_name,
    display_names,
)
from rdzv_etcd.errors import (
    EtcdError,
    EtcdRefusedError,
    EtcdUnavailableError,
    JobClosedError,
    JoinTimeoutError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    RdzvEtcdError,
)
from rdzv_etcd.etcd.api import TxnResult
from rdzv_etcd.group.conflict import Conflict
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.group.leadership import Leadership
from rdzv_etcd.group.patience import JoinPatience
from rdzv_etcd.group.standing import Phase, Standing, World
from rdzv_etcd.group.wait_lines import WaitLines
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import nodes_from, slice_from
from rdzv_etcd.settings import AfterEnd
from rdzv_etcd.text import shown

_RETRY_S = 0.5


class Joining:
    """One join: from the arrival to the formed round."""

    def __init__(
        self, context: NodeContext, standing: Standing, leadership: Leadership, timeout_s: float
    ) -> None:
        self._context = context
        self._standing = standing
        self._leadership = leadership
        self._patience = JoinPatience(context, standing, timeout_s)
        self._conflict = Conflict(context, self._patience)
        self._earlier: Closure | None = None
        """How the run ended after which this node was started, if it has told about that."""

    async def run(self, address: str, port: int) -> World:
        """Arrive and wait; see :meth:`rdzv_etcd.group.node.Node.join` for the errors."""
        context, standing = self._context, self._standing
        settings = context.settings
        standing.begin_join(
            NodeInfo(standing.node_id, address, port, 0, settings.job, settings.rank_key)
        )
        try:
            return await self._until_admitted()
        except BaseException:
            await self._withdraw()
            raise

    async def tell(self) -> None:
        """Tell what :meth:`run` waits for, beside it, until cancelled."""
        await WaitLines(self._context, self._standing, self._patience).run()

    async def _until_admitted(self) -> World:
        context, standing, patience = self._context, self._standing, self._patience
        while True:
            standing.check_not_gone()
            patience.plan_to_close()
            world = standing.admit(context.control.view)
            if world is not None:
                context.narrator.say(
                    f"round {world.round}: rank {world.rank} of {world.size}, "
                    f"master {world.master_address}:{world.master_port}, epoch {world.epoch}"
                )
                context.pulse.beat()
                return world
            try:
                await self._advance()
            except (EtcdRefusedError, EtcdUnavailableError, OutcomeUnknownError) as error:
                if context.clock.now_s() >= patience.deadline_s():
                    last = patience.last_word(error)
                    if last is error:
                        raise
                    raise last from error
                await patience.sit_out(error)

    async def _advance(self) -> None:
        """Do what is next, or wait for something to change."""
        context, standing = self._context, self._standing
        if context.control.problem is not None:  # it may be over
            await context.control.refresh(self._patience.limit_s())
        self._check_welcome()
        if await self._conflict.outlast():
            return
        large = standing.unread(context.control.view)
        if large is not None:
            await self._read_slice(large)
        elif self._must_arrive():
            await self._arrive()
        else:
            self._patience.relieved()  # there is nothing to ask etcd for, whatever it refused
            deadline_s = self._patience.deadline_s()
            until_s = None if deadline_s == math.inf else deadline_s
            if not await context.pulse.wait(until_s) and self._is_over():
                raise JoinTimeoutError(await self._timeout_message())

    def _is_over(self) -> bool:
        return self._context.clock.now_s() >= self._patience.deadline_s()

    # -- arriving -------------------------------------------------------------------------------

    def _must_arrive(self) -> bool:
        """Whether this node has not arrived, or with a session or for a run that is over."""
        context, standing = self._context, self._standing
        if not standing.arrived_with or standing.arrived_with != context.session.lease_id:
            return True
        info, control = standing.info, context.control.view
        if info is None:
            return False
        formed = control.formed
        put_back = formed is not None and formed.epoch_fixed is not None
        if put_back and standing.arrived_under != control.round_revision:
            # There may be presences of nodes that have long gone, back with an older snapshot of
            # etcd; and of a large world the leader may not know all members. It can tell others
            # from them only if all who wait ask again, and say whether they were in it.
            return True
        if formed is not None and info.arrived_for <= formed.number:
            # Named, but not admitted: see `admit`. Expelled: named in a round that it never saw, so
            # the others think that it works there. Anybody else waits for a seat.
            return standing.rank_in(formed) is not None or info.node_id in formed.expelled
        return info.arrived_for > control.next_number

    async def _arrive(self) -> None:
        context, standing = self._context, self._standing
        async with standing.presence_lock:
            standing.check_not_gone()  # leaving waits for the lock, or has it behind it
            self._check_open()  # healing may have held the lock for longer than the run went on
            control = context.control.view
            info = standing.plan_arrival(
                control, context.settings.epoch_floor, context.clock.wall_s()
            )
            if info is None:
                return
            limit_s = self._patience.limit_s()
            slice_ = standing.slice_to_put_back(control)
            standing.forget_arrival()  # whatever an earlier one said is not what is wanted now
            try:
                session = await context.session.open(min(limit_s, context.urgent_limit_s))
                result = await context.etcd.txn(
                    requests.arrive(
                        context.keys,
                        info,
                        session,
                        control.round_revision,
                        requests.put_slice(context.keys, control.formed, slice_),
                    ),
                    timeout_s=limit_s,
                    repeatable=True,
                )
            except LeaseNotFoundError:
                context.session.lost(context.session.lease_id)
                return
            self._patience.relieved()
            if result.succeeded:
                self._patience.note_arrival()
                standing.note_arrival(session, control)
                if slice_ is not None:
                    standing.note_slice_there(control)
                claimed = result.results[1]
                if isinstance(claimed, TxnResult):
                    self._leadership.note(Leader(info.node_id, info.settings), claimed)
                context.pulse.beat()  # if the leader has gone meanwhile, this node may claim
                context.narrator.say(f"arrived for round {info.arrived_for}, waiting for others")
                return
        context.take_control(result)
        if context.control.view.round_revision == control.round_revision:
            await self._look_again()  # what came with the refusal was older than the view

    async def _read_slice(self, record: Round) -> None:
        """Learn this node's rank in a large world: its slice was there before the record was."""
        context, standing = self._context, self._standing
        revision = context.control.view.round_revision
        if record.slices is None:
            return
        if self._is_over():
            raise JoinTimeoutError(
                f"round {record.number} was formed, but the part of its ranks that names this node "
                f"could not be read within {self._patience.timeout_s:g} s"
            )
        request = requests.read_slice(context.keys, record, record.slices, standing.node_id)
        result = await context.etcd.get(request, timeout_s=context.urgent_limit_s)
        found = slice_from(record, standing.node_id, result)
        if found is not None:
            standing.note_slice(found, revision)
            return
        # A later round has swept it away; or data was lost, and no member has put it back (yet).
        await self._look_again()
        if standing.unread(context.control.view) == record:
            if record.epoch_fixed is not None:
                await self._arrive()
            else:
                await context.clock.sleep(_RETRY_S)

    async def _look_again(self) -> None:
        context = self._context
        await context.control.refresh(context.settings.connection.request_timeout_s)

    async def _withdraw(self) -> None:
        """Take the presence back: whoever saw this node waiting does not count on it any more."""
        standing = self._standing
        if standing.phase is Phase.GONE:
            return  # leaving ends the session itself, and what follows relies on that
        standing.give_up_join()
        await asyncio.shield(self._end_session())

    async def _end_session(self) -> None:
        context = self._context
        async with self._standing.presence_lock:  # leaving waits for it
            with contextlib.suppress(EtcdError):  # then the lease runs out
                await context.session.end(context.farewell_limit_s)

    # -- reasons to stop waiting ----------------------------------------------------------------

    def _check_welcome(self) -> None:
        """Raise if this node has no business here (any more)."""
        context, control, standing = self._context, self._context.control.view, self._standing
        if context.control.problem is not None:
            raise context.control.problem
        self._check_open()
        if control.closure is not None and self._earlier is None and standing.origin is None:
            self._earlier = control.closure
            self._meet_end(self._earlier)

    def _check_open(self) -> None:
        """Raise JobClosedError if the run that this node belongs to has ended."""
        if self._standing.closure is not None:
            raise self._closed_error(self._standing.closure)

    def _meet_end(self, closure: Closure) -> None:
        """Do what ``after_end`` says: this node was started after the job was closed.

        Raises JobClosedError unless it is part of a new run.
        """
        context = self._context
        after_end, text = context.settings.after_end, self._closed_text(closure)
        if after_end is AfterEnd.NEW_RUN:
            context.narrator.warn(
                f"{text}. This node was started after that and begins a new run of the job, for "
                f"which it waits for {context.settings.job} (with after_end=refuse or "
                "after_end=finish it would end instead)"
            )
            return
        if after_end is AfterEnd.FINISH:
            context.narrator.warn(f"{text}. There is nothing left to do here (after_end=finish)")
        raise JobClosedError(
            f"{text}. This node was started after that (after_end={after_end.value}, "
            f"closed_ttl={context.settings.timing.closed_ttl_s})",
            succeeded=closure.succeeded,
            was_member=False,
            is_refused=after_end is AfterEnd.REFUSE,
        )

    def _closed_error(self, closure: Closure) -> JobClosedError:
        return JobClosedError(
            self._closed_text(closure),
            succeeded=closure.succeeded,
            was_member=self._standing.was_member,
        )

    def _closed_text(self, closure: Closure) -> str:
        ago_s = max(0.0, self._context.clock.wall_s() - closure.wall_s)
        return (
            f"job {self._context.settings.job_id!r} was closed by {display_name(closure.by)}, "
            f"{ago_s:.0f} s ago: {shown(closure.reason)}"
        )

    async def _timeout_message(self) -> str:
        context = self._context
        text = (
            f"round {context.control.view.next_number} was not formed within "
            f"{self._patience.timeout_s:g} s: "
        )
        try:
            result = await context.etcd.get(requests.read_nodes(context.keys), timeout_s=5.0)
            here = sorted(nodes_from(context.keys, result, 0.0).present)
        except RdzvEtcdError as error:
            return f"{text}etcd does not answer ({error})"
        needed = context.settings.job.min_nodes
        text += f"{len(here)} of at least {needed} nodes arrived ({display_names(here)})"
        return text if self._earlier is None else f"{text}. {self._closed_text(self._earlier)}"
