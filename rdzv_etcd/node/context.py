"""What the parts of one node share: identity, settings, connection, view, log; and how they write.

Log lines are for a person to follow: what this node waits for and why, when that changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError, EtcdPermissionError, LeaseNotFoundError
from rdzv_etcd.etcd.port import Etcd, GetResult, KeyValue, Txn, TxnResult
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.names import Names
from rdzv_etcd.node.session import Session
from rdzv_etcd.node.views import KeyView, ViewWatch, key_after, key_from
from rdzv_etcd.node.waiting import Backoff, Wakeup
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import encode_node
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Control, Leader, NodeInfo, Refused
from rdzv_etcd.protocol.views import control_after, control_from
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import LINE, shown

_log = logging.getLogger("rdzv_etcd")

PROGRESS_EVERY_S = 2.0
"""Progress (3 of 64 nodes here, 4 of 64 …) is logged at most this often; the last state always."""
REFUSED_TTL_S = 600
"""For how long a node that could not join is shown."""


class StatusLog:
    """Logs a thing once, in one line that names the job and this node."""

    def __init__(self, job_id: str, node_id: str) -> None:
        self.names = Names([node_id])
        """How all lines of this node name nodes."""
        self._job_id = job_id
        self._node_id = node_id
        self._last = ""
        self._progress_after_s = 0.0

    def info(self, text: str, *, warn: bool = False) -> None:
        """Log at INFO, or with ``warn`` at WARNING, if it differs from the last line."""
        if text != self._last:
            self._last = text
            level = logging.WARNING if warn else logging.INFO
            if _log.isEnabledFor(level):
                _log.log(level, "%s", self._line(text))

    def warn(self, text: str) -> None:
        """Log at WARNING if it differs from the last line."""
        self.info(text, warn=True)

    def fail(self, text: str, error: BaseException) -> None:
        """Log at ERROR, with the traceback."""
        _log.error("%s", self._line(f"{text}: {error!r}"), exc_info=error)

    def _line(self, text: str) -> str:
        return shown(f"[{self._job_id}] {self.names(self._node_id)}: {text}", LINE)

    def progress(self, text: str, now_s: float) -> float | None:
        """Log how a wait proceeds, unless that was done just now.

        Returns when to call again with the text as it is then, ``None`` if nothing is left to log.
        """
        if not text or text == self._last:
            return None
        if now_s < self._progress_after_s:
            return self._progress_after_s
        self._progress_after_s = now_s + PROGRESS_EVERY_S
        self.info(text)
        return None


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a node is. ``node_id`` is ``<host>~<pid>~<random>``: unique, and readable in etcd."""

    node_id: str
    run_seed: str
    """Random; names the run if this node starts one."""

    def is_beside(self, node_id: str) -> bool:
        """Whether that node is of this one's host."""
        return node_id.split("~", 1)[0] == self.node_id.split("~", 1)[0]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node's connections and settings."""

    identity: Identity
    settings: Settings
    keys: JobKeys
    etcd: Etcd
    clock: Clock
    wakeup: Wakeup
    session: Session
    control: ViewWatch[Control]
    presence: ViewWatch[KeyView]
    """What stands in the place of this node's own presence."""
    log: StatusLog
    recorder: Recorder
    presence_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the presence is written: arriving, repairing and leaving exclude each other."""

    @property
    def leaving_limit_s(self) -> float:
        """How long leaving may take: after a TTL, etcd removes the node anyway."""
        timing = self.settings.timing
        return min(timing.close_timeout_s, float(timing.lease_ttl_s))

    @property
    def urgent_limit_s(self) -> float:
        """How long a write that others wait for may go without an answer, before this node looks
        what became of it: about a TTL, because within that it may be declared lost anyway."""
        timing = self.settings.timing
        return min(self.settings.connection.request_timeout_s, max(5.0, timing.lease_ttl_s))

    @property
    def to_grant(self) -> str:
        """What to do if etcd does not let this node read or write a key of the job's."""
        root = self.keys.root.decode(errors="replace")
        return (
            f". Every node needs all keys under {root}, as each may come to lead: etcdctl role "
            f"grant-permission ROLE --prefix=true readwrite {root}"
        )

    # -- writing ----------------------------------------------------------------------------------

    async def write(
        self, txn: Txn, session: int, *, timeout_s: float | None = None
    ) -> TxnResult | None:
        """Apply a transaction that puts something on this node's lease, ``session``, and may be
        repeated; ``None`` if etcd no longer knows that lease, which ends the session.

        Raises EtcdError.
        """
        try:
            return await self.etcd.txn(txn, timeout_s=timeout_s, repeatable=True)
        except LeaseNotFoundError:
            self.session.lost(session)
            return None

    def backoff(self) -> Backoff:
        """Return the waits of one kind of write: in the end as rare as the lease is renewed."""
        return Backoff(self.session.renewal_period_s)

    async def back_off(
        self, backoff: Backoff, error: EtcdError, complaint: str, *, at_least_s: float = 0.0
    ) -> None:
        """Wait after ``error`` before the next try. The first refusal is logged with ``complaint``;
        that etcd does not answer is logged by the keep-alives."""
        if backoff.is_news(error):
            hint = self.to_grant if isinstance(error, EtcdPermissionError) else ""
            self.log.warn(f"{complaint}: {error}{hint}")
        await self.clock.sleep(max(at_least_s, backoff.after(error)))

    def show_written(self, revision: int, **news: Any) -> None:
        """Put what this node has written at ``revision`` into the view, ahead of the watch.

        If the watch was faster it has shown it, and perhaps what became of it since.
        """
        view = self.control.view
        if revision > view.revision:
            self.control.adopt(replace(view, **news))

    async def put_presence(
        self, txn: Txn, info: NodeInfo, session: int, timeout_s: float
    ) -> TxnResult | None:
        """Apply a transaction that puts this node's presence, and show the outcome in the views;
        ``None`` if etcd no longer knows the lease. Raises EtcdError, StateCorruptError."""
        result = await self.write(txn, session, timeout_s=timeout_s)
        if result is not None and not result.succeeded:
            self.take_control(result)
        elif result is not None:
            seen, at = self.presence.seen, result.revision
            if seen is not None and at > seen.revision:
                kv = KeyValue(self.keys.node(info.node_id), encode_node(info), at, at, 1, session)
                self.presence.adopt(KeyView(at, kv))
        return result

    def show_leader(self, leader: Leader, claimed: TxnResult) -> None:
        """Put into the view which node leads after a claim; ``leader``: this node's proposal."""
        known = self.control.view.leader_revision
        news = requests.leader_after(leader, claimed, known)
        if news is not None:
            self.show_written(claimed.revision, leader=news[0], leader_revision=news[1])

    def take_control(self, result: TxnResult) -> None:
        """Adopt the control keys that came last with a refused transaction, if they are news.

        Raises StateCorruptError.
        """
        got = result.results[-1]
        if isinstance(got, GetResult) and got.revision >= self.control.view.revision:
            self.control.adopt(control_from(self.keys, got))

    # -- nodes that cannot join -------------------------------------------------------------------

    async def note_refused(self, how: str = "") -> None:
        """Show operators and the job's nodes, which may be waiting for this one, that it cannot
        join: ``how`` its gate failed; by default, that its settings are not the job's."""
        if self.control.view.refused is not None:
            return
        refused = Refused(self.identity.node_id, self.settings.job, self.clock.wall_s(), how)
        limit_s = self.leaving_limit_s
        with contextlib.suppress(EtcdError):  # best effort
            lease = (await self.etcd.grant(REFUSED_TTL_S, timeout_s=limit_s)).lease_id
            txn = requests.note_refused(self.keys, refused, lease)
            if not (await self.etcd.txn(txn, timeout_s=limit_s)).succeeded:
                await self.etcd.revoke(lease, timeout_s=limit_s)

    async def forget_refused(self) -> None:
        """Withdraw what a node of this host noted when its gate failed: this one has passed."""
        refused, lease = self.control.view.refused, self.control.view.refused_lease
        if refused is not None and refused.how and self.identity.is_beside(refused.node_id):
            with contextlib.suppress(EtcdError):  # best effort
                await self.etcd.revoke(lease, timeout_s=self.leaving_limit_s)


def make_context(
    etcd: Etcd,
    settings: Settings,
    identity: Identity,
    clock: Clock,
    recorder: Recorder,
    *,
    works: Callable[[], bool],
    build: Callable[[GetResult], Control],
    notice: Callable[[Control], None],
    on_regress: Callable[[], None],
) -> NodeContext:
    """Make what the parts of a node share. ``works``: see :class:`Session`; the other functions are
    called by the view of the control keys: see :class:`ViewWatch`."""
    timing = settings.timing
    wakeup, log = Wakeup(clock), StatusLog(settings.job_id, identity.node_id)
    keys = JobKeys(settings.prefix, settings.job_id)
    etcd.watch_health.check_every(timing.lease_ttl_s)
    session = Session(
        etcd,
        clock,
        wakeup,
        timing.lease_ttl_s,
        timing.keep_alive_deadline_s,
        warn=log.warn,
        works=works,
        recorder=recorder,
    )
    control: ViewWatch[Control] = ViewWatch(
        etcd,
        clock,
        wakeup,
        request=keys.control.read(),
        build=build,
        fold=lambda view, batch: control_after(keys, view, batch.revision, batch.events),
        notice=notice,
        complain=lambda error: log.warn(f"uses what it read before: {error}"),
        on_regress=on_regress,
        longest_retry_s=timing.lease_ttl_s / 3,
    )
    presence: ViewWatch[KeyView] = ViewWatch(
        etcd,
        clock,
        wakeup,
        request=requests.read_presence(keys, identity.node_id),
        build=key_from,
        fold=key_after,
        longest_retry_s=timing.lease_ttl_s / 3,
    )
    return NodeContext(
        identity, settings, keys, etcd, clock, wakeup, session, control, presence, log, recorder
    )
