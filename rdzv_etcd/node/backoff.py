"""How soon to ask etcd again after it did not do what it was asked. Knows no clock."""

from __future__ import annotations

from rdzv_etcd.errors import EtcdRefusedError

RETRY_S = 0.5
"""How long to wait before the next try: after a request that got no answer, which has taken its
time already, after the first refusal, and where nothing says how long it will last."""


class Backoff:
    """The waits between tries; after refusals they grow to ``longest_s``.

    A refusal is quick, and each costs etcd something (out of space: a raft proposal), so a node
    must not repeat it much more often than it renews its lease.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = max(RETRY_S, longest_s)
        self._next_s = RETRY_S
        self._refused = False

    def is_news(self, error: Exception) -> bool:
        """Whether ``error`` is the first refusal, which people must be told of."""
        return isinstance(error, EtcdRefusedError) and not self._refused

    def after(self, error: Exception) -> float:
        """Return how many seconds to wait after ``error``."""
        if not isinstance(error, EtcdRefusedError):
            return RETRY_S
        self._refused = True
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s)
        return wait_s

    def reset(self) -> None:
        """Note that etcd does what it is asked."""
        self._next_s = RETRY_S
        self._refused = False
