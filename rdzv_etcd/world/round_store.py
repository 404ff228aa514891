"""The key-value store of a round, for launchers and under torch's store.

:mod:`rdzv_etcd.kv.store` says what each operation promises and costs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from rdzv_etcd.arguments import named_key, seconds_or_none, several_items, several_keys
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.protocol.keys import KeyRange
from rdzv_etcd.runtime.faces import Blocking, Call, Runner

T = TypeVar("T")

TIMEOUT_S = 300.0
"""How long an operation may take unless the caller says otherwise; torch's stores have the same."""


class StoreRunner(Runner, Protocol):
    """Runs what a store asks of etcd: a hold on the library's event loop, or a node."""

    def keep(self, user: object, /) -> None: ...


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


class AnyRoundStore:
    """The key-value store of a world; see :class:`RoundStore`."""

    def __init__(
        self,
        etcd: Etcd,
        runner: StoreRunner,
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
        self._part = runner
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

    @Call
    def get(
        self, key: str, timeout_s: float | None = TIMEOUT_S, *, even_if_over: bool = False
    ) -> Coroutine[Any, Any, bytes]:
        """Return the value; waits for a missing key."""
        what = f"store key {named_key(key)}"
        return self._wait(partial(self._store.get, key), timeout_s, what, even_if_over)

    @Call
    def multi_get(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> Coroutine[Any, Any, list[bytes]]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        several = several_keys(keys)
        work = partial(self._store.multi_get, several)
        return self._wait(work, timeout_s, _named(several), even_if_over)

    @Call
    def wait(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> Coroutine[Any, Any, None]:
        """Return when all keys exist."""
        several = several_keys(keys)
        work = partial(self._store.wait, several)
        return self._wait(work, timeout_s, _named(several), even_if_over)

    @Call
    def check(
        self, keys: Iterable[str], timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, bool]:
        """Return at once whether all keys exist."""
        return self._store.check(several_keys(keys), seconds_or_none(timeout_s))

    @Call
    def num_keys(self, timeout_s: float | None = TIMEOUT_S) -> Coroutine[Any, Any, int]:
        """Return how many values there are."""
        return self._store.num_keys(seconds_or_none(timeout_s))

    @Call
    def list_keys(self, timeout_s: float | None = TIMEOUT_S) -> Coroutine[Any, Any, list[str]]:
        """Return the keys of all values in ascending order."""
        return self._store.list_keys(seconds_or_none(timeout_s))

    # -- writing ----------------------------------------------------------------------------------

    @Call
    def set(
        self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, None]:
        """Set the value. Raises :class:`~rdzv_etcd.errors.RequestTooLargeError`."""
        return self._store.set(key, value, seconds_or_none(timeout_s))

    @Call
    def multi_set(
        self, values: Mapping[str, bytes], timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, None]:
        """Set all; raises :class:`~rdzv_etcd.errors.RequestTooLargeError`."""
        return self._store.multi_set(several_items(values), seconds_or_none(timeout_s))

    @Call
    def add(
        self, key: str, amount: int, timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, int]:
        """Add a whole number (a missing key is zero) and return the sum; never counts twice.

        Raises :class:`~rdzv_etcd.errors.NotANumberError`, a :class:`ValueError`, if the value is no
        64-bit number.
        """
        return self._store.add(key, amount, seconds_or_none(timeout_s))

    @Call
    def append(
        self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, None]:
        """Append to the value; a missing key is set."""
        return self._store.append(key, value, seconds_or_none(timeout_s))

    @Call
    def compare_set(
        self, key: str, expected: bytes, desired: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> Coroutine[Any, Any, bytes]:
        """Set the value if it is the expected one; return the value afterwards.

        A missing key is set if ``expected`` is empty; otherwise ``expected`` is returned.
        """
        return self._store.compare_set(key, expected, desired, seconds_or_none(timeout_s))

    @Call
    def delete(self, key: str, timeout_s: float | None = TIMEOUT_S) -> Coroutine[Any, Any, bool]:
        """Delete the key; return whether it was there."""
        return self._store.delete(key, seconds_or_none(timeout_s))

    def _wait(
        self,
        work: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        what: str,
        even_if_over: bool,
    ) -> Coroutine[Any, Any, T]:
        """Do what waits for other members, who owe it ``what``. ``even_if_over``: it keeps waiting
        when the world is over."""
        limit_s = seconds_or_none(timeout_s)
        if self._unless_over is None:
            return work(limit_s)
        return self._unless_over(
            what, partial(work, limit_s), partial(work, 0.0), even_if_over=even_if_over
        )


class RoundStore(Blocking, AnyRoundStore):
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

    def keep(self, user: object) -> None:
        """Keep ``user`` alive as long as the runner, for callers that Python knows nothing of."""
        self._part.keep(user)


def _named(keys: Sequence[str]) -> str:
    some = ", ".join(named_key(key) for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"store keys {some}{more}"
