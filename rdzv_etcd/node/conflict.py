"""Settings other than the job's: an error while the job lives; a job that has died is outlasted."""

from __future__ import annotations

from rdzv_etcd.errors import JobSettingsMismatchError
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.join_limits import JoinLimits
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.model import Control
from rdzv_etcd.protocol.views import nodes_from
from rdzv_etcd.settings import JobSettings

_EXPIRY_S = 2.0
"""How much later than its TTL a lease of the dead may vanish: etcd looks twice a second."""


class Conflict:
    """Watches, for one join, whether a job of other settings stands in the way."""

    def __init__(self, context: NodeContext, limits: JoinLimits) -> None:
        self._context = context
        self._limits = limits
        self._since_s = 0.0

    async def outlast(self, theirs: JobSettings, whose: str) -> None:
        """Wait for a change, because a job of other settings stands in the way.

        A dead job leaves its record until the job lease ends, and its nodes their presences until
        theirs do. A node that is still there after its TTL is alive, so then this raises
        JobSettingsMismatchError; and when the time to join is up. Raises EtcdError as well.
        """
        context, limits = self._context, self._limits
        control, now_s = context.control.view, context.clock.now_s()
        ttls_s = await self._others_ttls_s()
        somebody = control.leader is not None or bool(ttls_s)
        problem = (
            f"this node was started with {context.settings.job}, but {whose} settings are {theirs}"
        )
        if not limits.conflict:
            self._since_s = now_s
        until_s = limits.began_s + limits.timeout_s
        why = "no node of that job is there: waiting until what it left in etcd expires"
        if somebody:
            longest_s = max(context.session.longest_ttl_s, *ttls_s, 0)
            until_s = min(until_s, self._since_s + longest_s + _EXPIRY_S)
            why = f"waiting up to {until_s - now_s:.0f} s, because its nodes may be dead"
        if now_s >= until_s:
            raise JobSettingsMismatchError(
                f"job {context.settings.job_id!r}: {problem}; start all nodes of a job with the "
                "same --nnodes"
            )
        if not limits.conflict:
            context.log.warn(f"{problem}; {why}")
            if somebody:
                await context.note_refused()
        limits.note_conflict(f"for the job id to become free: {problem}")
        seen = _keys(control)
        await context.wakeup.wait(
            until_s, when=lambda: limits.ends() or _keys(context.control.view) != seen
        )

    async def _others_ttls_s(self) -> list[int]:
        """The TTLs of the leases of others that are there, or may be: 0 where it is not known."""
        keys = self._context.keys
        result = await self._context.etcd.get(requests.read_two_nodes(keys))
        nodes = nodes_from(keys, result, self._context.clock.now_s())
        mine = self._context.identity.node_id
        ttls_s = {keys.node_id(kv.key): 0 for kv in result.kvs}
        ttls_s |= {node_id: one.info.lease_ttl_s for node_id, one in nodes.present.items()}
        return [ttl_s for node_id, ttl_s in ttls_s.items() if node_id != mine]


def _keys(control: Control) -> tuple[int, int]:
    return control.round_revision, control.leader_revision
