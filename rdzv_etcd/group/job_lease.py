"""The grant of a job lease: what everything lives on that a job leaves in etcd."""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.api import LeaseGrant
from rdzv_etcd.group.context import NodeContext


class JobLease:
    """A lease that the leader grants ahead and gives to the first round it forms."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._granting: asyncio.Task[LeaseGrant] | None = None

    def begin(self) -> asyncio.Task[LeaseGrant]:
        """Begin to grant the lease, unless that is under way or done."""
        granting = self._granting
        if granting is None or (granting.done() and granting.exception() is not None):
            context = self._context
            granting = asyncio.ensure_future(
                context.etcd.grant(
                    context.settings.timing.job_ttl_s, timeout_s=context.urgent_limit_s
                )
            )
            granting.add_done_callback(_look_at)
            self._granting = granting
        return granting

    async def get(self) -> int:
        """Return its id; raises EtcdError."""
        return (await asyncio.shield(self.begin())).lease_id

    def given_away(self) -> None:
        """It is a round's now, or may be: then it expires if it is not."""
        self._granting = None

    async def drop(self) -> None:
        """Revoke it if no round uses it. If this is cancelled, call it again."""
        granting = self._granting
        if granting is None:
            return
        limit_s = self._context.farewell_limit_s
        with contextlib.suppress(EtcdError, TimeoutError):  # it expires by itself
            # Shielded: of a grant that was cut off nobody would know the id.
            grant = await self._context.clock.wait_for(asyncio.shield(granting), limit_s)
            await self._context.etcd.revoke(grant.lease_id, timeout_s=limit_s)
        if self._granting is granting:
            self._granting = None


def _look_at(granting: asyncio.Task[LeaseGrant]) -> None:
    """Retrieve the error of a grant that nobody may wait for any more."""
    if not granting.cancelled():
        granting.exception()
