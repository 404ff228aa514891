"""A gate in front of each arrival: a node that does not pass it does not join.

Asked by :mod:`rdzv_etcd.group.gate_check`, on the caller's thread and never on the event loop. A
failure is remembered in etcd for its host, on a lease of its own: so the next process there, which
a supervisor may start at once, knows of it (:mod:`rdzv_etcd.core.gate` decides what follows).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine

from rdzv_etcd.clock import abandon
from rdzv_etcd.core.gate import must_cool_down, one_more
from rdzv_etcd.core.model import GateFailures
from rdzv_etcd.core.names import display_name
from rdzv_etcd.core.wait_text import LineTimes
from rdzv_etcd.errors import (
    EtcdError,
    GateError,
    RdzvEtcdError,
    StateCorruptError,
    WatchLostError,
)
from rdzv_etcd.etcd.api import EventKind, GetResult
from rdzv_etcd.group.gate_check import (
    Arrival,
    Check,
    CommandCheck,
    Failure,
    FunctionCheck,
    GateFunction,
)
from rdzv_etcd.group.node import Node
from rdzv_etcd.schema import health_requests
from rdzv_etcd.schema.values import decode_gate, decode_key
from rdzv_etcd.settings.checks import gate_words
from rdzv_etcd.text import shown

_TRIES = 3
"""Other nodes of the host may fail at the same time, but not again and again."""
_SHOWN = 400


class Gate:
    """The gate of one node; for one join at a time."""

    def __init__(self, node: Node, function: GateFunction | None) -> None:
        """``function`` is asked besides the settings' ``gate_command``, after it."""
        self._node = node
        self._words = gate_words(node.context.settings.gate_command)
        self._function = function
        self._check: Check | None = None
        self._is_abandoned = False
        self._known: GateFailures | None = None
        """What is remembered of this node's host …"""
        self._revision = 0
        """… the revision of that, 0: nothing …"""
        self._lease = 0
        """… and the lease that it is on."""

    @property
    def is_open(self) -> bool:
        """Whether there is nobody to ask."""
        return not self._words and self._function is None

    # -- before: on the event loop ----------------------------------------------------------------

    async def cool_down(self, limit_s: float | None) -> bool:
        """Wait until nodes of this host may try again; ``False`` if a join would end at once.

        Raises GateError after ``limit_s`` (default: the settings' ``join_timeout_s``).
        """
        node, context = self._node, self._node.context
        self._is_abandoned = False
        if node.is_told_to_stop:
            return False
        if not context.settings.gate_cooldown_s:
            return True
        if limit_s is None:
            limit_s = context.settings.timing.join_timeout_s
        until_s = context.clock.now_s() + limit_s
        await self._look()
        if not must_cool_down(self._known):
            return True
        why = self._why_hot()
        context.log.warn(
            f"waits until its host has cooled down, {context.settings.gate_cooldown_s:g} s after "
            f"the last failure: {why}"
        )
        await node.give_up_seat(-1, f"waits to cool down: {why}")
        cooling = asyncio.ensure_future(self._until_cool())
        cooling.add_done_callback(lambda _: context.wakeup.notify())

        def may_go_on() -> bool:
            return cooling.done() or node.is_told_to_stop or node.has_left

        try:
            while not may_go_on():
                if not await context.wakeup.wait(until_s, when=may_go_on):
                    raise GateError(
                        f"{self._head()}: its host was not cool within {limit_s:g} s: {why}",
                        node=context.identity.node_id,
                    )
            if cooling.done():
                cooling.result()
        finally:
            await abandon(cooling)
        return not node.is_told_to_stop

    async def _until_cool(self) -> None:
        context = self._node.context
        key = context.keys.gate(context.identity.name)
        while must_cool_down(self._known):
            watch = context.etcd.watch(key, start_revision=0, tell_resumes=True)
            try:
                await watch.ready()
                await self._look()
                if not must_cool_down(self._known):
                    return
                async for batch in watch:
                    if not batch.events or batch.events[-1].kind is EventKind.DELETE:
                        break  # or it goes on after a break
            except WatchLostError:
                pass
            except EtcdError as error:
                context.log.warn(f"cannot look whether its host is cool, and goes on: {error}")
                return
            finally:
                await watch.close()
            await self._look()

    async def _look(self) -> None:
        """Read what is remembered of this host. If etcd does not say, nothing is: the arrival will
        have to wait for it, too."""
        context = self._node.context
        request = health_requests.read_gate(context.keys, context.identity.name)
        try:
            self._take(await context.etcd.get(request, timeout_s=context.urgent_limit_s))
        except EtcdError as error:
            self._known, self._revision, self._lease = None, 0, 0
            context.log.say(f"cannot read how nodes of its host have fared: {error}")

    def _take(self, found: GetResult) -> None:
        self._known, self._revision, self._lease = None, 0, 0
        for kv in found.kvs:
            self._revision = kv.mod_revision
            if not kv.lease_id:
                continue  # nobody here wrote that: it would stay for ever
            try:
                self._known, self._lease = decode_key(decode_gate, kv), kv.lease_id
            except StateCorruptError as error:
                self._node.context.log.warn(str(error))

    def _why_hot(self) -> str:
        known = self._known
        if known is None:
            return ""
        return f"{known.count} times in a row a node did not pass there, last: {shown(known.how)}"

    # -- the question: on the caller's thread -----------------------------------------------------

    def ask(self) -> Failure | None:
        """Ask the gate; blocks for at most ``gate_timeout_s`` for each of command and function."""
        node, context = self._node, self._node.context
        arrival = Arrival(
            context.settings.job_id,
            context.identity.node_id,
            node.control.next_number,
            node.last_change,
        )
        failure = None
        if self._words:
            failure = self._wait_for(CommandCheck(self._words, arrival))
        if failure is None and self._function is not None and not self._is_abandoned:
            failure = self._wait_for(FunctionCheck(self._function, arrival))
        return failure

    def _wait_for(self, check: Check) -> Failure | None:
        context = self._node.context
        clock, limit_s = context.clock, context.settings.gate_timeout_s
        self._check = check
        began_s, lines = clock.now_s(), LineTimes()
        try:
            if self._is_abandoned:
                return None  # nobody waits for it, or the join says that the node has left
            while True:
                waited_s = clock.now_s() - began_s
                if waited_s >= limit_s:
                    return check.late(limit_s)
                if check.wait(min(limit_s, lines.next_s) - waited_s):
                    return check.answer()
                if lines.is_due(waited_s):
                    context.log.warn(f"waiting {waited_s:.0f} s for its gate")
        finally:
            check.abandon()
            self._check = None

    def abandon(self) -> None:
        """Let a question go that is under way on another thread. May be called on any."""
        self._is_abandoned = True
        check = self._check
        if check is not None:
            check.abandon()

    # -- after: on the event loop -----------------------------------------------------------------

    async def settle(self, failure: Failure | None) -> None:
        """Remember the answer; raises GateError if it was no."""
        if failure is None:
            await self._forget()
            return
        node, context = self._node, self._node.context
        how = shown(f"its gate {failure.how}", _SHOWN)
        context.log.warn(f"does not join: {how}")
        await node.give_up_seat(-1, how)
        await self._remember(how)
        raise GateError(
            f"{self._head()}: {how}. Mend what it checks, or keep this host out of the job",
            node=context.identity.node_id,
            exit_code=failure.exit_code,
            output=failure.output,
        ) from failure.cause

    def _head(self) -> str:
        context = self._node.context
        name = display_name(context.identity.node_id)
        return f"{name} does not join job {context.settings.job_id!r}"

    async def _forget(self) -> None:
        """Forget earlier failures: this one counts. What others have noted since is on a lease of
        its own, and stays."""
        if self._lease:
            context = self._node.context
            await self._courtesy(
                context.etcd.revoke(self._lease, timeout_s=context.farewell_limit_s)
            )

    async def _remember(self, how: str) -> None:
        cooldown_s = self._node.context.settings.gate_cooldown_s
        if cooldown_s:
            await self._courtesy(self._count(how, math.ceil(cooldown_s)))

    async def _count(self, how: str, ttl_s: int) -> None:
        context, host = self._node.context, self._node.context.identity.name
        limit_s = context.farewell_limit_s
        grant = await context.etcd.grant(ttl_s, timeout_s=limit_s)
        for _ in range(_TRIES):
            failures = one_more(self._known, how, context.identity.node_id, context.clock.wall_s())
            txn = health_requests.note_gate_failure(
                context.keys, host, failures, grant.lease_id, revision=self._revision
            )
            result = await context.etcd.txn(txn, timeout_s=limit_s)
            if result.succeeded:
                if self._lease:  # nothing is on it any more
                    await context.etcd.revoke(self._lease, timeout_s=limit_s)
                return
            (found,) = result.results
            if isinstance(found, GetResult):
                self._take(found)
        await context.etcd.revoke(grant.lease_id, timeout_s=limit_s)

    async def _courtesy(self, work: Coroutine[object, object, object]) -> None:
        """What does not matter enough to fail with."""
        try:
            await work
        except RdzvEtcdError as error:
            self._node.context.log.say(f"etcd did not note how this node's gate went: {error}")
