"""The store that torch's agent uses between a rendezvous and the start of its workers.

A member can die after it arrived and before its lease runs out: then a round is formed with it, and
torch's agents wait for what it would have written (``_assign_worker_ranks``) until the store's
timeout, 300 s, and fail. They look at ``num_nodes_waiting()`` only once their workers run. So when
the round is known to be over, this store answers such a wait in the lost member's place; the agent
starts its workers, looks, and re-joins at once. What the answer says does not matter then.

Knows the names that torch's agent uses (``SimpleElasticAgent._assign_worker_ranks``, torch 2.5 to
2.13); a wait under any other name ends as in any store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rdzv_etcd.core.member import World
from rdzv_etcd.group.group import Group
from rdzv_etcd.torch_plugin.torch_store import EtcdStore

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_GRACE_S = 1.0
"""Room for an answer that is on its way when the round ends."""


class AgentStore(EtcdStore):
    """An :class:`EtcdStore` in which no agent waits for a member that is known to be lost."""

    def __init__(self, group: Group, world: World) -> None:
        place = group.keys.store(world.round, world.run)
        super().__init__(group.etcd, group.loop_thread, place, world.job_lease)
        self._world = world
        self._when_over = group.round_over
        self._own_info: dict[str, Any] = {}

    def set(self, key: str, value: str | bytes) -> None:
        if key == f"{_ROLE_INFO}{self._world.rank}":
            self._own_info = json.loads(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """As :meth:`EtcdStore.get`; see the module for the exception."""
        (value,) = self._read([key], lambda limit_s: self._get_one(key, limit_s))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As :meth:`EtcdStore.multi_get`; see the module for the exception."""
        wanted = list(keys)
        return self._read(wanted, lambda limit_s: self._store.multi_get(wanted, limit_s))

    async def _get_one(self, key: str, limit_s: float | None) -> list[bytes]:
        return [await self._store.get(key, limit_s)]

    def _read(
        self,
        keys: list[str],
        operation: Callable[[float | None], Coroutine[Any, Any, list[bytes]]],
    ) -> list[bytes]:
        if not self._own_info or not keys or not all(map(self._has_stand_in, keys)):
            return self._run(operation)
        return self._run(lambda limit_s: self._unless_over(keys, operation(limit_s)))

    async def _unless_over(
        self, keys: list[str], reading: Coroutine[Any, Any, list[bytes]]
    ) -> list[bytes]:
        answer = asyncio.ensure_future(reading)
        over = asyncio.ensure_future(self._when_over())
        try:
            await asyncio.wait({answer, over}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=_GRACE_S)
            if answer.done():
                return answer.result()
            return [self._stand_in(key) for key in keys]
        finally:
            for task in (answer, over):
                task.cancel()
            await asyncio.wait({answer, over})

    def _has_stand_in(self, key: str) -> bool:
        return key.startswith((_ROLE_INFO, _ASSIGNED_RANKS))

    def _stand_in(self, key: str) -> bytes:
        """What a member like this one would have written."""
        if key.startswith(_ROLE_INFO):
            return json.dumps({**self._own_info, "rank": int(key[len(_ROLE_INFO) :])}).encode()
        workers = int(self._own_info["local_world_size"])
        first, total = self._world.rank * workers, self._world.size * workers
        return json.dumps([first, total, first, total]).encode()
