"""``EtcdStore``: a ``torch.distributed.Store`` on the round's key-value store in etcd.

Translates between torch's store interface and :mod:`rdzv_etcd.group.round_store`: values, timeouts
and errors. Knows nothing of keys in etcd or of requests.

What torch's C++ code calls on a store written in Python (seen with 2.13, through ``PrefixStore``
and ``Store.barrier``): ``set get add check wait append compare_set multi_get multi_set
has_extended_api clone`` by their Python names, but ``deleteKey`` and ``getNumKeys``. A timeout set
on a ``PrefixStore`` reaches only the base class, so ``self.timeout`` is read for every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rdzv_etcd.errors import NotANumberError, RdzvEtcdError, StoreTimeoutError
from rdzv_etcd.group.round_store import RoundStore

T = TypeVar("T")


class EtcdStore(Store):
    """Complete, thread-safe, usable under ``PrefixStore``; independent of any node's life.

    Every method blocks for at most the store's timeout (300 s unless ``set_timeout`` says
    otherwise; as in torch zero means no limit), also when etcd is away, and raises
    ``torch.distributed.DistStoreError``, which names the missing keys when it waited for some.
    It must not be called on the loop's own thread.
    """

    timeout: timedelta  # the base class's property, which torch's type stubs do not mention

    def __init__(self, store: RoundStore, *, timeout: timedelta | None = None) -> None:
        """Whoever gives the store keeps it usable as long as this one. Nothing is sent."""
        super().__init__()
        self._store = store
        if timeout is not None:
            self.set_timeout(timeout)

    # -- reading ----------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """Return the value; waits for a missing key."""
        return self._do(lambda limit_s: self._store.get(key, limit_s, even_if_over=True))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        return self._do(
            lambda limit_s: self._store.multi_get(list(keys), limit_s, even_if_over=True)
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys exist; ``timeout`` instead of the store's."""
        self._do(lambda limit_s: self._store.wait(list(keys), limit_s, even_if_over=True), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys exist, without waiting for them."""
        return self._do(lambda limit_s: self._store.check(list(keys), limit_s))

    def num_keys(self) -> int:
        return self._do(self._store.num_keys)

    def list_keys(self) -> list[str]:
        return self._do(self._store.list_keys)

    # -- writing ----------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._do(lambda limit_s: self._store.set(key, _bytes(value), limit_s))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise dist.DistStoreError(
                f"multi_set got {len(keys)} keys but {len(values)} values; it needs one per key"
            )
        items = {key: _bytes(value) for key, value in zip(keys, values, strict=True)}
        self._do(lambda limit_s: self._store.multi_set(items, limit_s))

    def add(self, key: str, amount: int) -> int:
        """Add to a number (a missing key is zero) and return the sum; never counts twice."""
        return self._do(lambda limit_s: self._store.add(key, amount, limit_s))

    def append(self, key: str, value: str | bytes) -> None:
        self._do(lambda limit_s: self._store.append(key, _bytes(value), limit_s))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set the value if it is the expected one; return the value afterwards."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._do(lambda limit_s: self._store.compare_set(key, expected, desired, limit_s))

    def delete_key(self, key: str) -> bool:
        """Delete the key; tell whether it was there."""
        return self._do(lambda limit_s: self._store.delete(key, limit_s))

    # -- the rest ---------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """``append``, ``multi_get`` and ``multi_set`` exist."""
        return True

    def clone(self) -> EtcdStore:
        """Return another store on the same keys, with a timeout of its own."""
        other = EtcdStore(self._store, timeout=self.timeout)
        # C++ code that asks for a clone keeps the C++ object only, which is nothing without this.
        self._store.keep(other)
        return other

    def deleteKey(self, key: str) -> bool:
        """:meth:`delete_key`, by the name torch's C++ code calls."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """:meth:`num_keys`, by the name torch's C++ code calls."""
        return self.num_keys()

    def _do(self, operation: Callable[[float | None], T], timeout: timedelta | None = None) -> T:
        limit_s = _seconds(self.timeout if timeout is None else timeout)
        try:
            return operation(limit_s)
        except NotANumberError:
            raise  # a ValueError, which is not etcd's fault
        except StoreTimeoutError as error:
            raise dist.DistStoreError(str(error)) from error
        except RdzvEtcdError as error:
            raise dist.DistStoreError(f"the store on etcd failed: {error}") from error


def _seconds(timeout: timedelta) -> float | None:
    """Return a limit as torch means it: zero is none, below zero is over at once."""
    seconds = timeout.total_seconds()
    return None if seconds == 0 else max(0.0, seconds)


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a store value must be str or bytes, not {type(value).__name__}")
