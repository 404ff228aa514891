"""A client for tools: what an operator asks of an etcd beside what nodes do.

Knows which of etcd's calls answers it. Must not know what the leases are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv_etcd.etcd.client import EtcdClient


@dataclass(frozen=True, slots=True)
class LeaseLeft:
    """A lease as etcd sees it."""

    left_s: int
    granted_s: int

    @property
    def silent_s(self) -> int:
        """How long ago it was renewed."""
        return max(0, self.granted_s - self.left_s)


class InspectingClient(EtcdClient):
    """An :class:`EtcdClient` that can also look at leases of others."""

    async def lease_left(
        self, lease_id: int, *, timeout_s: float | None = None
    ) -> LeaseLeft | None:
        """Ask how long a lease has left, without renewing it; ``None`` if it is gone.

        Raises :class:`~rdzv_etcd.errors.EtcdError`. On an etcd with users it needs permission to
        read what is on the lease.
        """
        response = await self._time_to_live(lease_id, self._timeout_s(timeout_s))
        return None if response.TTL < 0 else LeaseLeft(response.TTL, response.grantedTTL)
