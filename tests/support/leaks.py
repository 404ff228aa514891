"""After a test: no thread, no socket, no key and no lease of the job may be left.

Looks at this process and at etcd from outside; knows only where a job's keys are.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

import psutil

from tests.support.gateway import StoredKey
from tests.support.processes import SPAWNER


class Store(Protocol):
    """What the check reads of an etcd."""

    def keys(self, prefix: bytes = b"") -> dict[bytes, StoredKey]: ...

    def leases(self) -> set[int]: ...


def job_root(job_id: str, prefix: str = "/rdzv_etcd") -> bytes:
    """The prefix of a job's keys, worked out independently of the library."""
    return f"{prefix}/{quote(job_id, safe='')}/".encode()


def left_of_job(store: Store, job_id: str, leases_before: set[int] | None = None) -> list[str]:
    """The job's keys, and with ``leases_before`` all other leases there are now; what remembers the
    job's epochs, and its rounds on the same lease, does not count: it stays for ``ended_ttl``."""
    root = job_root(job_id)
    keys = store.keys(root)
    memory = keys.pop(root + b"ctl/epoch", None)
    left = [
        repr(key)
        for key, stored in keys.items()
        if memory is None
        or not key.startswith(root + b"audit/")
        or stored.lease_id != memory.lease_id
    ]
    if leases_before is None:
        return left
    leases = store.leases() - leases_before - (set() if memory is None else {memory.lease_id})
    return left + [f"lease {lease:016x}" for lease in leases]


@dataclass
class _WatchedJob:
    store: Store
    root: bytes
    leases_before: set[int]


@dataclass
class LeakCheck:
    """Compares the end of a test with its beginning.

    ``timeout_s`` is how long things may take to vanish: set it above a lease's TTL where the test
    kills nodes. ``threads_allowed`` and ``keys_allowed`` name what may stay (name and key
    prefixes; keys relative to the job's root). The lease of an allowed key may stay with it.
    """

    timeout_s: float = 10.0
    threads_allowed: tuple[str, ...] = (SPAWNER,)
    keys_allowed: tuple[bytes, ...] = (
        b"ctl/round",
        b"ctl/ended",
        b"ctl/epoch",
        b"ctl/stranger",
        b"audit/",
    )
    _jobs: list[_WatchedJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._sockets = _sockets()

    def watch_job(self, store: Store, job_id: str, prefix: str = "/rdzv_etcd") -> None:
        """Check this job too (``store``: a server's ``gateway``); call before the job starts."""
        self._jobs.append(_WatchedJob(store, job_root(job_id, prefix), store.leases()))

    def check(self) -> None:
        """Wait up to ``timeout_s`` for everything to be gone; raise ``AssertionError`` if not."""
        deadline = time.monotonic() + self.timeout_s
        for name, look in self._looks():
            left = look()
            while left and time.monotonic() < deadline:
                time.sleep(0.05)  # the ends of threads, sockets and leases send no event
                left = look()
            assert not left, f"the test left {name}: {left}"

    def _looks(self) -> Iterable[tuple[str, Callable[[], list[str]]]]:
        yield "threads", self._new_threads
        yield "sockets", self._new_sockets
        for job in self._jobs:
            yield "etcd keys", functools.partial(self._new_keys, job)
            yield "etcd leases", functools.partial(self._new_leases, job)

    def _new_threads(self) -> list[str]:
        gc.collect()  # an object that is garbage already is not a leak, but must not hide one
        return [
            thread.name
            for thread in threading.enumerate()
            if thread not in self._threads and not thread.name.startswith(self.threads_allowed)
        ]

    def _new_sockets(self) -> list[str]:
        gc.collect()
        return sorted(set(_sockets()) - set(self._sockets))

    def _may_stay(self, key: bytes) -> bool:
        """Whether the part of a key below its job's root is allowed to stay."""
        return key.startswith(self.keys_allowed)

    def _new_keys(self, job: _WatchedJob) -> list[str]:
        keys = job.store.keys(job.root)
        return [repr(key) for key in keys if not self._may_stay(key[len(job.root) :])]

    def _new_leases(self, job: _WatchedJob) -> list[str]:
        """A test's other jobs, which have ids of their own, may leave the same behind."""
        jobs = job.root[: job.root.rindex(b"/", 0, -1) + 1]
        kept = {
            value.lease_id
            for key, value in job.store.keys(jobs).items()
            if self._may_stay(key[len(jobs) :].partition(b"/")[2])
        }
        return [f"{lease:016x}" for lease in job.store.leases() - job.leases_before - kept]


def _sockets() -> dict[str, None]:
    """This process's TCP and UDP sockets, readable; a dict only to keep their order."""
    found = psutil.Process().net_connections(kind="inet")
    return {f"fd {c.fd} {_address(c.laddr)}->{_address(c.raddr)} {c.status}": None for c in found}


def _address(address: object) -> str:
    return ":".join(map(str, address)) if isinstance(address, tuple) else "-"
