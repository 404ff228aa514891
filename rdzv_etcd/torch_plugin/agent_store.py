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

import json
from collections.abc import Sequence
from typing import Any

from rdzv_etcd.errors import WorldOverError
from rdzv_etcd.group.world import World
from rdzv_etcd.torch_plugin.torch_store import EtcdStore

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"


class AgentStore(EtcdStore):
    """An :class:`EtcdStore` in which no agent waits for a member that is known to be lost."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store)
        self._world = world
        self._own_info: dict[str, Any] = {}

    def set(self, key: str, value: str | bytes) -> None:
        if key == f"{_ROLE_INFO}{self._world.rank}":
            self._own_info = json.loads(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """As :meth:`EtcdStore.get`; see the module for the exception."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As :meth:`EtcdStore.multi_get`; see the module for the exception."""
        wanted = list(keys)
        if not (self._own_info and wanted and all(map(self._has_stand_in, wanted))):
            return super().multi_get(wanted)
        return self._do(lambda limit_s: self._get_or_stand_in(wanted, limit_s))

    def _get_or_stand_in(self, keys: Sequence[str], limit_s: float | None) -> list[bytes]:
        try:
            return self._world.store.multi_get(keys, limit_s)
        except WorldOverError:
            return [self._stand_in(key) for key in keys]

    def _has_stand_in(self, key: str) -> bool:
        return key.startswith((_ROLE_INFO, _ASSIGNED_RANKS))

    def _stand_in(self, key: str) -> bytes:
        """What a member like this one would have written."""
        if key.startswith(_ROLE_INFO):
            return json.dumps({**self._own_info, "rank": int(key[len(_ROLE_INFO) :])}).encode()
        workers = int(self._own_info["local_world_size"])
        first, total = self._world.rank * workers, self._world.size * workers
        return json.dumps([first, total, first, total]).encode()
