"""The store that torch's agent uses beside its workers: before they start, and after they end.

**Before.** A member can die after it arrived and before its lease runs out: then a round is formed
with it, and torch's agents wait for what it would have written (``_assign_worker_ranks``) until the
store's timeout, 300 s, and fail. They look at ``num_nodes_waiting()`` only once their workers run.
So when the round is known to be over, this store answers such a wait in the lost member's place;
the agent starts its workers, looks, and re-joins at once. What the answer says does not matter
then.

**After.** An agent whose workers have succeeded waits for all others in torch's exit barrier, for
300 s. It does not look at ``num_nodes_waiting()`` any more and will not join again: the others are
told so, and do not wait for it. Its own wait ends when the job is closed, whatever world the others
are in by then. If the store has lost who was counted (the job lease has run out, etcd was wiped),
all meet at a barrier instead, which such a loss does not touch.

Knows the names that torch's agent uses (``SimpleElasticAgent._assign_worker_ranks`` and
``_exit_barrier``, torch 2.5 to 2.13); a wait under any other name ends as in any store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rdzv_etcd.errors import JobClosedError, StoreLostError, StoreTimeoutError, WorldOverError
from rdzv_etcd.torch_plugin.torch_store import EtcdStore, texts_of
from rdzv_etcd.world.round_store import TIMEOUT_S
from rdzv_etcd.world.world import World, note_finished, wait_until_closed

_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_FINISHED = "torchelastic/agent/terminal_state/num_members"
_ALL_FINISHED = "torchelastic/agent/terminal_state/last_member"

_log = logging.getLogger("rdzv_etcd")


class AgentStore(EtcdStore):
    """An :class:`EtcdStore` in which no agent waits for a member that is known to be lost, and that
    tells the others when this agent's workers have finished."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store)
        self._world = world
        self._own_info: dict[str, Any] = {}

    def set(self, key: str, value: str | bytes) -> None:
        if key == f"{_ROLE_INFO}{self._world.rank}":
            self._own_info = json.loads(value)
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        if key != _FINISHED:
            return super().add(key, amount)
        note_finished(self._world)
        return self._do(lambda limit_s: self._count(amount, limit_s))

    def _count(self, amount: int, limit_s: float | None) -> int:
        try:
            return self._world.store.add(_FINISHED, amount, limit_s)
        except StoreLostError:
            return 0  # nobody is the last one; the wait that follows makes up for it

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As :meth:`EtcdStore.wait`; torch's exit barrier also ends when the job is closed."""
        if texts_of(keys) == [_ALL_FINISHED]:
            self._do(self._wait_for_the_others, timeout)
        else:
            super().wait(keys, timeout)

    def _wait_for_the_others(self, limit_s: float | None) -> None:
        try:
            try:
                self._world.store.wait([_ALL_FINISHED], limit_s, even_if_over=True)
            except StoreLostError:
                self._meet_the_others(TIMEOUT_S if limit_s is None else limit_s)
        except JobClosedError:
            pass  # nobody else will finish; how it was closed is in the log
        except StoreTimeoutError:
            if not self._world.over:
                raise
            _log.warning(
                "this node's workers finished %g s ago, and the other nodes are in another world, "
                "or wait for one: this agent waits no longer",
                limit_s,
            )

    def _meet_the_others(self, limit_s: float) -> None:
        """Meet all members of this world at a barrier; if they are in another one by now, wait for
        the end of the job."""
        try:
            self._world.barrier(_ALL_FINISHED, limit_s)
        except JobClosedError:
            raise
        except WorldOverError:
            wait_until_closed(self._world, limit_s)

    def get(self, key: str) -> bytes:
        """As :meth:`EtcdStore.get`; see the module for the exception."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """As :meth:`EtcdStore.multi_get`; see the module for the exception."""
        wanted = texts_of(keys)
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
