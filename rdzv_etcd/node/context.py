"""What the parts of one node share: identity, settings, connection, view."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.port import Etcd, GetResult, TxnResult
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.node.session import Session
from rdzv_etcd.node.status_log import StatusLog
from rdzv_etcd.node.view_watch import ViewWatch
from rdzv_etcd.node.wakeup import Wakeup
from rdzv_etcd.protocol import health_requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Control, Refused
from rdzv_etcd.protocol.views import control_from
from rdzv_etcd.settings import Settings

REFUSED_TTL_S = 600
"""For how long a node that could not join is shown."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a node is. ``node_id`` is ``<host>~<pid>~<random>``: unique, and readable in etcd."""

    node_id: str
    run_seed: str
    """Random; names the run if this node starts one."""

    @property
    def name(self) -> str:
        return self.node_id.split("~", 1)[0]

    def is_beside(self, node_id: str) -> bool:
        """Whether that node is of this one's host."""
        return node_id.split("~", 1)[0] == self.name


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
    log: StatusLog
    recorder: Recorder
    presence_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the presence is written: arriving, repairing and leaving exclude each other."""

    @property
    def farewell_limit_s(self) -> float:
        """How long leaving may take: after a TTL etcd has done it anyway."""
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

    async def note_refused(self, how: str = "") -> None:
        """Show operators and the job's nodes, which may be waiting for this one, that it cannot
        join: ``how`` its gate failed; by default, that its settings are not the job's."""
        if self.control.view.refused is not None:
            return
        refused = Refused(self.identity.node_id, self.settings.job, self.clock.wall_s(), how)
        limit_s = self.farewell_limit_s
        with contextlib.suppress(EtcdError):  # best effort
            lease = (await self.etcd.grant(REFUSED_TTL_S, timeout_s=limit_s)).lease_id
            txn = health_requests.note_refused(self.keys, refused, lease)
            if not (await self.etcd.txn(txn, timeout_s=limit_s)).succeeded:
                await self.etcd.revoke(lease, timeout_s=limit_s)

    async def forget_refused(self) -> None:
        """Take back what a node of this host noted when its gate failed: this one has passed."""
        refused, lease = self.control.view.refused, self.control.view.refused_lease
        if refused is not None and refused.how and self.identity.is_beside(refused.node_id):
            with contextlib.suppress(EtcdError):  # best effort
                await self.etcd.revoke(lease, timeout_s=self.farewell_limit_s)

    def show_written(self, revision: int, **news: Any) -> None:
        """Put what this node has written at ``revision`` into the view, ahead of the watch.

        If the watch was faster it has shown it, and perhaps what became of it since.
        """
        view = self.control.view
        if revision > view.revision:
            self.control.adopt(replace(view, **news))

    def take_control(self, result: TxnResult) -> None:
        """Adopt the control keys that came last with a refused transaction, if they are news.

        Raises StateCorruptError.
        """
        got = result.results[-1]
        if isinstance(got, GetResult) and got.revision >= self.control.view.revision:
            self.control.adopt(control_from(self.keys, got))
