"""How long one join waits and for what: its deadline, and what is logged of the wait."""

from __future__ import annotations

import math
from functools import partial

from rdzv_etcd.errors import (
    EtcdError,
    EtcdPermissionError,
    EtcdRefusedError,
    JoinTimeoutError,
    RdzvEtcdError,
    StateCorruptError,
)
from rdzv_etcd.log import LineTimes
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.leave import closed_text
from rdzv_etcd.node.slices import with_members
from rdzv_etcd.node.views import read_pages, within
from rdzv_etcd.protocol.describe import (
    arrived_text,
    refused_lately,
    refused_text,
    round_text,
    seat_text,
)
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.views import nodes_from

_ANSWER_S = 5.0
"""How long to wait for etcd to list the nodes that are there."""


class JoinWait:
    """The wait of one join.

    A spare of a healthy round waits for as long as it needs; any other node for ``timeout_s``.
    """

    def __init__(self, context: NodeContext, member: Member, timeout_s: float) -> None:
        self._context = context
        self._member = member
        self.timeout_s = timeout_s
        self.began_s = context.clock.now_s()
        self.trouble: EtcdError | None = None
        """Why etcd does not do what it is asked, if it does not."""
        self.trouble_since_s = 0.0
        self.conflict = ""
        """Which job of other settings stands in the way of an arrival, if any."""
        self._known_refused = {""}
        """The nodes that cannot join, as far as they were logged."""

    def note_trouble(self, error: EtcdError | None) -> None:
        """Note that etcd does not do what it is asked, or, with ``None``, that it does again."""
        if error is not None and self.trouble is None:
            self.trouble_since_s = self._context.clock.now_s()
        self.trouble = error

    def note_conflict(self, which: str) -> None:
        """Note which job of other settings stands in the way; empty: none does any more."""
        self.conflict = which

    def is_spare(self) -> bool:
        """Whether a healthy round is running and this node waits for a seat in the next one."""
        control, member = self._context.control.view, self._member
        formed = control.formed
        return (
            formed is not None
            and control.open_change is None
            and member.rank_in(formed) is None
            and member.unread(control) is None
        )

    def deadline_s(self) -> float:
        """Until when to wait, on the clock.

        It counts from when the round was opened: a spare that has waited for days is still needed
        in the moment in which its seat becomes free.
        """
        if self.is_spare():
            if self.trouble is None:
                return math.inf
            return self.trouble_since_s + self.timeout_s
        return self.since_s() + self.timeout_s

    def since_s(self) -> float:
        """Since when it waits, which it began at some time, for the round that is open."""
        return max(self.began_s, self._member.opened_s)

    def is_over(self) -> bool:
        return self._context.clock.now_s() >= self.deadline_s()

    async def timeout(self) -> JoinTimeoutError:
        """Return the error of a join whose time is up, which names the nodes that are missing."""
        context = self._context
        control = context.control.view
        text = f"round {control.next_number} was not formed within {self.timeout_s:g} s: "
        try:
            limit_s = within(context.clock, _ANSWER_S)
            # A node that still works in the round before has not arrived.
            control = await with_members(context.etcd, context.keys, control, limit_s)
            result = await read_pages(context.etcd, context.keys.nodes, limit_s=limit_s)
        except EtcdPermissionError as error:
            return JoinTimeoutError(f"{text}who is there is not known: {error}{context.to_grant}")
        except (EtcdRefusedError, StateCorruptError) as error:
            return JoinTimeoutError(f"{text}who is there is not known: {error}")
        except RdzvEtcdError as error:
            return JoinTimeoutError(f"{text}etcd does not answer ({error})")
        nodes = nodes_from(context.keys, result, context.clock.now_s())
        arrived, missing = arrived_text(control, nodes, context.settings.job)
        text += missing
        earlier = self._member.met_end
        if earlier is not None:
            text += f". {closed_text(context, earlier)}"
        return JoinTimeoutError(text, arrived=arrived)

    # -- what it waits for, in the log ------------------------------------------------------------

    async def log(self) -> None:
        """Log at WARNING, which torchrun shows by default, what the join waits for, for which
        nodes and since when: soon, and then ever more rarely; until cancelled."""
        context = self._context
        await context.clock.sleep(LineTimes().next_s)  # most waits are over by then
        while True:
            waits_for, lines = self._waits_for(), LineTimes()
            self._known_refused.add(self._refused())
            is_other = partial(self._is_other, waits_for)
            _, since_s = waits_for
            while not await context.wakeup.wait(since_s + lines.next_s, when=is_other):
                waited_s = context.clock.now_s() - since_s
                context.log.warn(f"waiting {waited_s:.0f} s {await self._awaited()}")
                lines.note(waited_s)

    def _waits_for(self) -> tuple[bool, float]:
        """Whether it is for a seat, and since when."""
        is_spare = self.is_spare()
        return is_spare, self.began_s if is_spare else self.since_s()

    def _is_other(self, known: tuple[bool, float]) -> bool:
        return self._waits_for() != known or self._refused() not in self._known_refused

    def _refused(self) -> str:
        """The node that cannot join, if any; it is logged at once: it will not come by itself."""
        context = self._context
        if self.conflict or self.is_spare():
            return ""
        refused = refused_lately(context.control.view, context.settings.job)
        return "" if refused is None else refused_text(refused, context.log.names)

    async def _awaited(self) -> str:
        context = self._context
        if self.conflict:
            return self.conflict
        if self.trouble is not None:
            return f"for etcd: {self.trouble}"
        control = context.control.view
        if self.is_spare():
            return seat_text(context.settings.job_id, control)
        formed = control.formed
        settings = context.settings.job if formed is None else formed.settings
        size = settings.min_nodes if formed is None else max(settings.min_nodes, formed.size)
        few = size <= context.settings.slice_nodes and (formed is None or formed.slices is None)
        # All nodes ask at the same time: what they read must not grow with the square of the job.
        request = context.keys.nodes.read(count_only=not few)
        try:
            result = await context.etcd.get(request, timeout_s=_ANSWER_S)
            here = nodes_from(context.keys, result, context.clock.now_s()) if few else None
        except EtcdError as error:
            denied = isinstance(error, EtcdPermissionError)
            more = ", which does not show which nodes are there" if denied else ""
            return f"for etcd{more}: {error}{context.to_grant if denied else ''}"
        except RdzvEtcdError as error:
            return f"for round {control.next_number}: {error}"
        where = f"{context.settings.connection}, {context.settings.prefix}"
        names = context.log.names
        names.learn(() if here is None else here.present)
        return f"for {round_text(control, here, result.count, settings, where, names=names)}"
