"""Says what a node waits for, for whom and since when: soon, and then ever more rarely."""

from __future__ import annotations

from functools import partial

from rdzv_etcd.errors import EtcdError, EtcdPermissionError, RdzvEtcdError
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.join_limits import JoinLimits
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.views import nodes_from
from rdzv_etcd.protocol.wait_text import (
    LineTimes,
    refused_lately,
    refused_text,
    tell_round,
    tell_seat,
)

_ANSWER_S = 5.0
"""How long to wait for etcd to say who is there."""


class WaitLines:
    """The lines of one join, logged at WARNING: the level that torchrun shows by default."""

    def __init__(self, context: NodeContext, member: Member, limits: JoinLimits) -> None:
        self._context = context
        self._member = member
        self._limits = limits
        self._known_refused = {""}

    async def run(self) -> None:
        """Tell what this join waits for, until cancelled."""
        context = self._context
        await context.clock.sleep(LineTimes().next_s)  # most waits are over by then
        waits_for, lines = self._waits_for(), LineTimes()
        self._note_refused()
        while True:
            due_s = waits_for[1] + lines.next_s
            if await context.wakeup.wait(due_s, when=partial(self._is_other, waits_for)):
                waits_for, lines = self._waits_for(), LineTimes()
                self._note_refused()
                continue
            waited_s = context.clock.now_s() - waits_for[1]
            context.log.warn(f"waiting {waited_s:.0f} s {await self._what()}")
            lines.note(waited_s)

    def _waits_for(self) -> tuple[bool, float]:
        """Whether it is for a seat, and since when."""
        limits = self._limits
        if limits.is_spare():
            return True, limits.began_s
        return False, max(limits.began_s, self._member.opened_s)

    def _is_other(self, known: tuple[bool, float]) -> bool:
        return self._waits_for() != known or self._refused() not in self._known_refused

    def _refused(self) -> str:
        """Which node cannot join, which is logged at once: it will not come by itself."""
        context, limits = self._context, self._limits
        if limits.conflict or limits.is_spare():
            return ""
        refused = refused_lately(context.control.view, context.settings.job)
        return "" if refused is None else refused_text(refused, [self._member.node_id])

    def _note_refused(self) -> None:
        self._known_refused.add(self._refused())

    async def _what(self) -> str:
        context, limits = self._context, self._limits
        if limits.conflict:
            return limits.conflict
        if limits.trouble is not None:
            return f"for etcd: {limits.trouble}"
        control = context.control.view
        if limits.is_spare():
            return tell_seat(context.settings.job_id, control)
        formed = control.formed
        settings = context.settings.job if formed is None else formed.settings
        size = settings.min_nodes if formed is None else max(settings.min_nodes, formed.size)
        few = size <= context.settings.slice_nodes and (formed is None or formed.slices is None)
        # All nodes ask at the same time: what they read must not grow with the square of the job.
        request = (requests.read_nodes if few else requests.count_nodes)(context.keys)
        try:
            result = await context.etcd.get(request, timeout_s=_ANSWER_S)
            here = nodes_from(context.keys, result, context.clock.now_s()) if few else None
        except EtcdError as error:
            denied = isinstance(error, EtcdPermissionError)
            more = ", which does not show who is there" if denied else ""
            return f"for etcd{more}: {error}{context.to_grant if denied else ''}"
        except RdzvEtcdError as error:
            return f"for round {control.next_number}: {error}"
        where = f"{context.settings.connection}, {context.settings.prefix}"
        return tell_round(control, here, result.count, settings, where)
