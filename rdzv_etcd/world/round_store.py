"""The blocking face of a round's key-value store, for launchers and under torch's store.

:mod:`rdzv_etcd.kv.store` says what each operation promises and costs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from rdzv_etcd.arguments import named_key, seconds_or_none, several_items, several_keys
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import StoreTimeoutError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.protocol.keys import KeyRange

T = TypeVar("T")

TIMEOUT_S = 300.0
"""How long an operation may take unless the caller says otherwise; torch's stores have the same."""

_BACKSTOP_S = 10.0
"""The store's own deadline acts first; this is for a call that would not end by itself."""


class Runner(Protocol):
    """Runs work on the library's event loop: a hold on it, or a node."""

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None, /) -> T: ...

    def keep(self, user: object) -> None: ...


class UnlessOver(Protocol):
    """Does work that waits for other members, unless their world is over."""

    def __call__(
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        last_look: Callable[[], Coroutine[Any, Any, T]],
        /,
        *,
        even_if_over: bool,
    ) -> Coroutine[Any, Any, T]: ...


class RoundStore:
    """A key-value store that the members of one round share, and that is deleted with it.

    Values are bytes, keys any text. All methods may be called from any thread and block for at most
    ``timeout_s`` seconds (``None``: without limit), also while etcd cannot be reached. They raise
    :class:`~rdzv_etcd.errors.StoreTimeoutError`, :class:`~rdzv_etcd.errors.EtcdError`,
    :class:`~rdzv_etcd.errors.RendezvousFailedError` when this node has left, and
    :class:`~rdzv_etcd.errors.MisuseError` for invalid arguments.

    Those that wait for other members (``get``, ``multi_get``, ``wait``) end when the world is over,
    with :class:`~rdzv_etcd.errors.WorldOverError`, or with
    :class:`~rdzv_etcd.errors.JobClosedError` if the job was closed: the keys may never be set. With
    ``even_if_over=True`` they wait until the job is closed.
    """

    def __init__(
        self,
        etcd: Etcd,
        runner: Runner,
        keys: KeyRange,
        lease_id: int,
        *,
        unless_over: UnlessOver | None = None,
    ) -> None:
        """Open the store on ``keys``; everything it writes lives as long as the lease.

        ``etcd`` must live on ``runner``'s loop, and the caller keeps both as long as the store is
        used. Nothing is sent yet.
        """
        self._etcd = etcd
        self._runner = runner
        self._keys = keys
        self._lease_id = lease_id
        self._unless_over = unless_over

    @cached_property
    def _store(self) -> KeyValueStore:
        """Made on first use, which is after the rendezvous. Two threads may make one each."""
        return KeyValueStore(
            self._etcd, self._keys, self._lease_id, writer=uuid.uuid4().hex, clock=SystemClock()
        )

    # -- reading ----------------------------------------------------------------------------------

    def get(
        self, key: str, timeout_s: float | None = TIMEOUT_S, *, even_if_over: bool = False
    ) -> bytes:
        """Return the value; waits for a missing key."""
        return self._run(
            lambda limit_s: self._store.get(key, limit_s),
            timeout_s,
            f"store key {named_key(key)}",
            even_if_over=even_if_over,
        )

    def multi_get(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> list[bytes]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        keys = several_keys(keys)
        return self._run(
            lambda limit_s: self._store.multi_get(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    def wait(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> None:
        """Return when all keys exist."""
        keys = several_keys(keys)
        self._run(
            lambda limit_s: self._store.wait(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    def check(self, keys: Iterable[str], timeout_s: float | None = TIMEOUT_S) -> bool:
        """Tell at once whether all keys exist."""
        keys = several_keys(keys)
        return self._run(lambda limit_s: self._store.check(keys, limit_s), timeout_s)

    def num_keys(self, timeout_s: float | None = TIMEOUT_S) -> int:
        """Return how many values there are."""
        return self._run(self._store.num_keys, timeout_s)

    def list_keys(self, timeout_s: float | None = TIMEOUT_S) -> list[str]:
        """Return the keys of all values in ascending order."""
        return self._run(self._store.list_keys, timeout_s)

    # -- writing ----------------------------------------------------------------------------------

    def set(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Set the value. Raises :class:`~rdzv_etcd.errors.RequestTooLargeError`."""
        self._run(lambda limit_s: self._store.set(key, value, limit_s), timeout_s)

    def multi_set(self, values: Mapping[str, bytes], timeout_s: float | None = TIMEOUT_S) -> None:
        """Set all; raises :class:`~rdzv_etcd.errors.RequestTooLargeError`."""
        items = several_items(values)
        self._run(lambda limit_s: self._store.multi_set(items, limit_s), timeout_s)

    def add(self, key: str, amount: int, timeout_s: float | None = TIMEOUT_S) -> int:
        """Add a whole number (a missing key is zero) and return the sum; never counts twice.

        Raises :class:`~rdzv_etcd.errors.NotANumberError`, a :class:`ValueError`, if the value is no
        64-bit number.
        """
        return self._run(lambda limit_s: self._store.add(key, amount, limit_s), timeout_s)

    def append(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Append to the value; a missing key is set."""
        self._run(lambda limit_s: self._store.append(key, value, limit_s), timeout_s)

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> bytes:
        """Set the value if it is the expected one; return the value afterwards.

        A missing key is set if ``expected`` is empty; otherwise ``expected`` is returned.
        """
        return self._run(
            lambda limit_s: self._store.compare_set(key, expected, desired, limit_s), timeout_s
        )

    def delete(self, key: str, timeout_s: float | None = TIMEOUT_S) -> bool:
        """Delete the key; tell whether it was there."""
        return self._run(lambda limit_s: self._store.delete(key, limit_s), timeout_s)

    # -- the rest ---------------------------------------------------------------------------------

    def keep(self, user: object) -> None:
        """Keep ``user`` alive as long as the runner, for callers that Python knows nothing of."""
        self._runner.keep(user)

    def _run(
        self,
        operation: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        waits_for: str | None = None,
        *,
        even_if_over: bool = False,
    ) -> T:
        limit_s = seconds_or_none(timeout_s)
        backstop_s = None if limit_s is None else limit_s + _BACKSTOP_S
        work = self._work(operation, limit_s, waits_for, even_if_over=even_if_over)
        try:
            return self._runner.run(work, backstop_s)
        except TimeoutError as error:
            raise StoreTimeoutError(f"the store did not answer within {backstop_s:g} s") from error

    def _work(
        self,
        operation: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        waits_for: str | None = None,
        *,
        even_if_over: bool = False,
    ) -> Coroutine[Any, Any, T]:
        """The operation, for the library's event loop; ``waits_for``: what the other members may
        owe it; ``even_if_over``: it keeps waiting when the world is over."""
        if waits_for is None or self._unless_over is None:
            return operation(timeout_s)
        work, last_look = partial(operation, timeout_s), partial(operation, 0.0)
        return self._unless_over(waits_for, work, last_look, even_if_over=even_if_over)


def named(keys: Sequence[str]) -> str:
    some = ", ".join(named_key(key) for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"store keys {some}{more}"
