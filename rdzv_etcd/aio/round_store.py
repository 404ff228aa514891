"""A world's key-value store, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from rdzv_etcd.arguments import named_key, seconds_or_none, several_items, several_keys
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.world import round_store as blocking_store
from rdzv_etcd.world.participation import Participation
from rdzv_etcd.world.round_store import TIMEOUT_S, named

T = TypeVar("T")


class RoundStore:
    """The key-value store of a world, as :class:`rdzv_etcd.RoundStore`, which says what each method
    does. ``timeout_s`` are seconds, ``None``: without limit."""

    def __init__(self, store: blocking_store.RoundStore, part: Participation) -> None:
        """Made by :attr:`World.store`."""
        self._blocking = store
        self._part = part

    # -- reading ----------------------------------------------------------------------------------

    async def get(
        self, key: str, timeout_s: float | None = TIMEOUT_S, *, even_if_over: bool = False
    ) -> bytes:
        """Return the value; waits for a missing key."""
        return await self._do(
            lambda store, limit_s: store.get(key, limit_s),
            timeout_s,
            f"store key {named_key(key)}",
            even_if_over=even_if_over,
        )

    async def multi_get(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> list[bytes]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        keys = several_keys(keys)
        return await self._do(
            lambda store, limit_s: store.multi_get(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    async def wait(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> None:
        """Return when all keys exist."""
        keys = several_keys(keys)
        await self._do(
            lambda store, limit_s: store.wait(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    async def check(self, keys: Iterable[str], timeout_s: float | None = TIMEOUT_S) -> bool:
        """Tell at once whether all keys exist."""
        keys = several_keys(keys)
        return await self._do(lambda store, limit_s: store.check(keys, limit_s), timeout_s)

    async def num_keys(self, timeout_s: float | None = TIMEOUT_S) -> int:
        """Return how many values there are."""
        return await self._do(lambda store, limit_s: store.num_keys(limit_s), timeout_s)

    async def list_keys(self, timeout_s: float | None = TIMEOUT_S) -> list[str]:
        """Return the keys of all values in ascending order."""
        return await self._do(lambda store, limit_s: store.list_keys(limit_s), timeout_s)

    # -- writing ----------------------------------------------------------------------------------

    async def set(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Set the value."""
        await self._do(lambda store, limit_s: store.set(key, value, limit_s), timeout_s)

    async def multi_set(
        self, values: Mapping[str, bytes], timeout_s: float | None = TIMEOUT_S
    ) -> None:
        """Set all."""
        items = several_items(values)
        await self._do(lambda store, limit_s: store.multi_set(items, limit_s), timeout_s)

    async def add(self, key: str, amount: int, timeout_s: float | None = TIMEOUT_S) -> int:
        """Add to a number and return the sum; never counts twice."""
        return await self._do(lambda store, limit_s: store.add(key, amount, limit_s), timeout_s)

    async def append(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Append to the value; a missing key is set."""
        await self._do(lambda store, limit_s: store.append(key, value, limit_s), timeout_s)

    async def compare_set(
        self, key: str, expected: bytes, desired: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> bytes:
        """Set the value if it is the expected one; return the value afterwards."""
        return await self._do(
            lambda store, limit_s: store.compare_set(key, expected, desired, limit_s), timeout_s
        )

    async def delete(self, key: str, timeout_s: float | None = TIMEOUT_S) -> bool:
        """Delete the key; tell whether it was there."""
        return await self._do(lambda store, limit_s: store.delete(key, limit_s), timeout_s)

    async def _do(
        self,
        operation: Callable[[KeyValueStore, float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        waits_for: str | None = None,
        *,
        even_if_over: bool = False,
    ) -> T:
        store = self._blocking
        work = store._work(
            lambda limit_s: operation(store._store, limit_s),
            seconds_or_none(timeout_s),
            waits_for,
            even_if_over=even_if_over,
        )
        return await self._part.call(work)
