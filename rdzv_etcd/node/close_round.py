"""How a leader closes a round: its leases, the name of its run, slices, record and audit."""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import EtcdError, OutcomeUnknownError
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.job_leases import PreparedLease
from rdzv_etcd.node.slices import Roster
from rdzv_etcd.protocol import draft, requests
from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Control, Nodes, Round
from rdzv_etcd.text import many

_FORGETTING_S = 2.0
"""Limit for requests that can be made later: a leader that waits for them decides nothing."""


class RoundCloser:
    """Closes rounds for one node while it leads; :mod:`rdzv_etcd.protocol.closing` decides when."""

    def __init__(self, context: NodeContext, member: Member, roster: Roster) -> None:
        self._context = context
        self._member = member
        self._roster = roster
        timing = context.settings.timing
        self._job_lease = PreparedLease(context, timing.job_ttl_s)
        self._epoch_lease = PreparedLease(context, timing.ended_ttl_s)
        self._run_name: str | None = None
        """The name that this node has given to the present run."""
        self._names_given = 0

    def prepare_leases(self, control: Control) -> None:
        """Begin to grant what round 1 needs, so that it is not on its path."""
        if control.formed is not None:
            return
        self._job_lease.begin()
        if not (self._context.settings.embed or control.epoch_lease):
            self._epoch_lease.begin()

    async def drop_leases(self) -> None:
        """Revoke leases that no round uses. If this is cancelled, call it again."""
        await self._job_lease.drop()
        await self._epoch_lease.drop()

    async def replace_leases(self) -> None:
        """Note that etcd does not know one of them: the members put back what lived on it."""
        self._job_lease.forget()
        await self._epoch_lease.drop()

    async def close(self, control: Control, nodes: Nodes, decision: Close) -> bool:
        """Publish the round; ``False`` if things are not as they were when it was decided. Raises
        EtcdError."""
        context = self._context
        settings, member = context.settings, self._member
        highest = draft.highest_known_epoch(member, control, nodes, settings.epoch_floor)
        record = draft.next_record(
            member,
            control,
            nodes,
            decision,
            settings,
            run=self._name_run(control, highest),
            highest_epoch=highest,
            job_lease=0 if control.formed is not None else await self._job_lease.get(),
            lease_ttl_s=context.session.ttl_s,
        )
        epoch_lease = await self._lease_for_epoch(control, record)
        members = [node.node_id for node in decision.world]
        kept = settings.history
        audit = None
        if kept:
            audit = draft.audit(
                control,
                nodes,
                record,
                decision,
                closed_by=context.identity.node_id,
                now_s=context.clock.now_s(),
                wall_s=context.clock.wall_s(),
                opened_s=member.opened_s,
            )
        if not await self._roster.publish(control, record, members):
            return False
        try:
            result = await context.etcd.txn(
                requests.close_round(
                    context.keys, control, nodes.revision, record, audit, epoch_lease=epoch_lease
                ),
                timeout_s=context.urgent_limit_s,
            )
        except asyncio.CancelledError:  # this node stops; others may work on the round by now
            self._note_doubt()
            raise
        except OutcomeUnknownError:
            self._note_doubt()
            await context.control.refresh()  # whatever happened, it shows in the record
            return True
        if not result.succeeded:
            return False
        self._job_lease.forget()
        if epoch_lease:
            self._epoch_lease.forget()
        self._roster.note(record, members)
        news: dict[str, object] = {"round": record, "round_revision": result.revision}
        if epoch_lease:
            news |= {"epoch_base": record.epoch_base, "epoch_lease": epoch_lease}
        size = many(record.size, "node")
        context.log.names.learn(nodes.present)
        context.log.info(f"closed round {record.number} with {size}: {decision.reason}")
        context.show_written(result.revision, **news)
        if requests.remembered(result) > kept:
            await self._forget(kept)
        return True

    def _name_run(self, control: Control, highest_epoch: int) -> str:
        """Name the run of the next round: see :func:`~rdzv_etcd.protocol.draft.keeps_name`."""
        name = self._run_name
        if name is None or not draft.keeps_name(self._member, control, name, highest_epoch):
            self._names_given += 1
            seed = self._context.identity.run_seed
            name = seed if self._names_given == 1 else f"{seed}.{self._names_given}"
            self._run_name = name
        return name

    async def _lease_for_epoch(self, control: Control, record: Round) -> int:
        """Return the lease on which to remember what the record's epoch counts from, 0 if that is
        remembered. An embedded etcd ends with its run, and its memory with it. Raises EtcdError."""
        if self._context.settings.embed or record.epoch_base <= control.epoch_base:
            return 0
        return control.epoch_lease or await self._epoch_lease.get()

    def _note_doubt(self) -> None:
        """Note that a round may have been formed as drafted, or not: if etcd has forgotten it
        since, some nodes may know it all the same."""
        self._job_lease.in_doubt()
        self._epoch_lease.in_doubt()
        self._run_name = None

    async def _forget(self, kept: int) -> None:
        """Delete what is remembered of the oldest rounds, those of earlier runs among them. It is
        for people: if it fails, the next round is another occasion."""
        context = self._context
        with contextlib.suppress(EtcdError):
            found = await context.etcd.get(
                requests.read_history(context.keys, kept), timeout_s=_FORGETTING_S
            )
            surplus = requests.forget_history(found, kept)
            if surplus is not None:
                await context.etcd.txn(surplus, timeout_s=_FORGETTING_S, repeatable=True)
