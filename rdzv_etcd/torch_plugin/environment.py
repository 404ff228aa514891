"""The process around the handler: what workers find in its environment, and torch's launches.

**Environment.** Workers get their round's epoch and their agent's node id, and not etcd's password.
torch starts workers with a copy of ``os.environ`` as it is then. So it is changed when a round is
formed, which is just before, and again when torch asks for the run id, which it does for each
worker that it starts. It is put back when the last node that has changed it has left: the process
may be a notebook's. Until then a new handler reads here what the user gave: another job of this
process should not begin above this one's epoch.

**Launches.** After a ``SignalException`` torch's ``launch_agent`` does not call ``shutdown()``, and
in a notebook the traceback that is kept keeps the handler as well. Such a node would stay a member,
and the cell, if run again, would wait for it.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.parse import EPOCH_VARIABLE, NODE_ID_VARIABLE, WITHHELD
from rdzv_etcd.text import shown
from rdzv_etcd.world.group import Group

_log = logging.getLogger("rdzv_etcd")

# --- the environment ------------------------------------------------------------------------------

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
        values: dict[str, str | None] = dict.fromkeys(WITHHELD)
        values |= {EPOCH_VARIABLE: str(epoch), NODE_ID_VARIABLE: node_id}
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


# --- torch's launches -----------------------------------------------------------------------------


_nodes: dict[int, weakref.ref[Group]] = {}
"""The node of each thread's last launch. A thread runs one launch at a time."""


def end_interrupted_launches() -> None:
    """If a launch begins here, let the nodes leave that earlier launches of this process, on any
    thread, left behind. Blocks as ``Group.leave``."""
    if _launch_of(sys._getframe()) is None:
        return
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # its earlier launch is over
    with _lock:
        over = [thread for thread in _nodes if _launch_of(frames.get(thread)) is None]
        nodes = [_nodes.pop(thread)() for thread in over]
    for node in nodes:
        if node is not None and not node.has_left:
            _log.warning(
                "the previous launch of job %r in this process was interrupted: its node, %s, "
                "leaves now",
                node.job,
                node.node_id,
            )
            node.leave("its launch was interrupted")


def note_node(node: Group) -> None:
    """Note the node of the launch that begins here, if one does."""
    if _launch_of(sys._getframe()) is not None:
        with _lock:
            _nodes[threading.get_ident()] = weakref.ref(node)


def check_log_folder(job_id: str) -> None:
    """Raise SettingsError if torch cannot create the log folder of the launch that begins here,
    which it names after the job.

    torch creates it after the rendezvous: the other nodes would have stopped their workers by then,
    to take in a node that cannot start its own.
    """
    launch = _launch_of(sys._getframe())
    logs = None if launch is None else getattr(launch.f_locals.get("config"), "logs_specs", None)
    if type(logs) is not DefaultLogsSpecs or not Path(logs.root_log_dir).is_dir():
        return  # a program's own, or --log-dir=/dev/null
    try:
        Path(tempfile.mkdtemp(prefix=f"{job_id}_", dir=logs.root_log_dir)).rmdir()  # as torch does
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if "/" in job_id:
            cure = "give a --rdzv-id without '/'"
        elif getattr(error, "errno", None) == errno.ENAMETOOLONG:
            cure = "give a shorter --rdzv-id"
        else:
            cure = "make room there, or give another --log-dir"
        raise SettingsError(
            f"torch cannot create its log folder in {shown(logs.root_log_dir)}, which it names "
            f"after the job, {shown(job_id, 80)!r}: {why}; {cure}"
        ) from None


def _launch_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of torch's ``launch_agent`` that ``frame`` was called from, if any."""
    while frame is not None and frame.f_code.co_name != "launch_agent":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.distributed.launcher.api":
        return None
    return frame
