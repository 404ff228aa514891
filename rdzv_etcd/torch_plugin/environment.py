"""The environment of the handler's process, which torch's workers inherit.

Workers get their round's epoch and their agent's node id, and not etcd's password; with
``in_process=1`` they take part in the job, and get what they need for that.
torch starts workers with a copy of ``os.environ`` as it is then. So it is changed when a round is
formed, which is just before, and again when torch asks for the run id, which it does for each
worker that it starts. It is put back when the last node that has changed it has left: the process
may be a notebook's. Until then a new handler reads here what the user gave: another job of this
process should not begin above this one's epoch.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping

from rdzv_etcd.settings.parse import (
    EPOCH_VARIABLE,
    NODE_ID_VARIABLE,
    WITHHELD,
    WORKER_VARIABLE,
)

_log = logging.getLogger("rdzv_etcd")

_FOR_RECOVERY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Otherwise torch ends a process whose communicators are aborted; its agent's default is 1."""

_lock = threading.RLock()  # a signal's handler may shut a handler down at any point
_in_use: list[WorkerEnvironment] = []
"""In the order in which they were put to use."""
_given: dict[str, str | None] = {}
"""The user's values of the variables that are changed (``None``: not set)."""
_put: dict[str, str | None] = {}
"""The values that were put in their place."""
_warned: set[str] = set()


class WorkerEnvironment:
    """What the workers of one node should find in their environment. For any thread."""

    def __init__(self) -> None:
        self._values: dict[str, str | None] = {}

    def prepare(self, epoch: int, node_id: str) -> None:
        """Change this process's environment to what workers of that round should inherit."""
        withheld = dict.fromkeys((*WITHHELD, WORKER_VARIABLE))
        self._prepare({**withheld, EPOCH_VARIABLE: str(epoch), NODE_ID_VARIABLE: node_id})

    def prepare_for_nodes(self, node_id: str, worker: str) -> None:
        """The same for workers that are nodes themselves: nothing of the user's is withheld."""
        self._prepare({NODE_ID_VARIABLE: node_id, WORKER_VARIABLE: worker, **_FOR_RECOVERY})

    def _prepare(self, values: dict[str, str | None]) -> None:
        with _lock:
            self._values = values
            if self not in _in_use:
                _in_use.append(self)
            several = len(_in_use) > 1
            _put_in(values)
        if several:
            _warn_once(
                "several nodes of this process have workers: torch starts them with the process's "
                "environment, so if two launches do so at the same moment, RDZV_ETCD_EPOCH and "
                "RDZV_ETCD_NODE_ID of some may be another's. Launch each from a process of its own"
            )
        if _fork_server_runs():
            _warn_once(
                "a fork server of multiprocessing runs in this process: workers that are started "
                "by it (--start-method=forkserver) inherit the environment that was there at its "
                "start, and not the RDZV_ETCD_EPOCH of their round. Use --start-method=spawn"
            )

    def put_again(self) -> None:
        """Prepare again for the same round, if any: another node's values may be there."""
        with _lock:
            if self in _in_use:
                _put_in(self._values)

    def give_back(self) -> None:
        """Leave the environment to the other nodes of this process; after the last, restore the
        user's values, unless the program has changed them. Idempotent."""
        with _lock:
            if self not in _in_use:
                return
            _in_use.remove(self)
            if _in_use:
                _put_in(_in_use[-1]._values)
                return
            for name, value in _given.items():
                if os.environ.get(name) == _put.get(name):
                    _set(name, value)
            _given.clear()
            _put.clear()

    def begin_to_give_back(self) -> None:
        """Give back without blocking: the holder of the lock may be waiting for this thread."""
        if _lock.acquire(blocking=False):
            try:
                self.give_back()
            finally:
                _lock.release()
        else:
            threading.Thread(
                target=self.give_back, name="rdzv-etcd environment", daemon=True
            ).start()


def full_environment() -> Mapping[str, str]:
    """Return the process's environment, as the user gave it."""
    with _lock:
        # Name by name: other threads may remove some meanwhile.
        found = {name: os.environ.get(name) for name in list(os.environ)}
        for name, value in _given.items():
            if found.get(name) == _put.get(name):
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


def _replace_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent's may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_replace_lock)


def _put_in(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        now = os.environ.get(name)
        if name not in _given or now != _put.get(name):
            _given[name] = now
        _put[name] = value
        _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)


def _fork_server_runs() -> bool:
    """Whether one was started; Python has no public way to ask, and never starts another."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return getattr(server, "_forkserver_pid", None) is not None
