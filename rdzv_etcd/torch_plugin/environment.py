"""What workers get of the agent's environment: their round's epoch, their agent's node id, and not
etcd's password.

torch starts workers with a copy of ``os.environ`` as it is then. So it is changed when a round is
formed, which is just before, and again when torch asks for the run id, which it does for each
worker that it starts. It is put back when the last node that has changed it has left: the process
may be a notebook's, and is its user's. Until then a new handler finds here what the user gave:
another job of this process should not begin above this one's epoch.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.parse import EPOCH_VARIABLE, NODE_ID_VARIABLE, PASSWORD_VARIABLE
from rdzv_etcd.text import shown
from rdzv_etcd.world.group import Group

_log = logging.getLogger("rdzv_etcd")

_lock = threading.RLock()  # a signal's handler may shut a handler down wherever it comes
_in_use: list[WorkerEnvironment] = []
"""In the order in which they were put to use."""
_given: dict[str, str | None] = {}
"""What the user gave (``None``: nothing) of what is changed."""
_put: dict[str, str | None] = {}
"""What was put in its place."""
_warned: set[str] = set()


class WorkerEnvironment:
    """What the workers of one node should find in their environment. For any thread."""

    def __init__(self, launch: Launch | None = None) -> None:
        """``launch`` is that whose workers they are, if torch's: when it is over they are gone."""
        self._launch = launch
        self._values: dict[str, str | None] = {}

    def prepare(self, epoch: int, node_id: str) -> None:
        """Change this process's environment to what workers of that round should inherit."""
        values = {PASSWORD_VARIABLE: None, EPOCH_VARIABLE: str(epoch), NODE_ID_VARIABLE: node_id}
        with _lock:
            self._values = values
            _forget_launches_that_are_over()
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
        """The same for the round that it is prepared for, if any: another node's may be there."""
        with _lock:
            if self in _in_use:
                _put_in(self._values)

    def give_back(self) -> None:
        """Leave the environment to the other nodes of this process; after the last, put back what
        the user gave, unless something else was put in its place. Idempotent."""
        with _lock:
            if self not in _in_use:
                return
            _in_use.remove(self)
            _forget_launches_that_are_over()
            if _in_use:
                _put_in(_in_use[-1]._values)
                return
            for name, value in _given.items():
                if os.environ.get(name) == _put.get(name):
                    _set(name, value)
            _given.clear()
            _put.clear()

    def begin_to_give_back(self) -> None:
        """The same, where it must not block: who holds the lock may be waiting for this thread."""
        if _lock.acquire(blocking=False):
            try:
                self.give_back()
            finally:
                _lock.release()
        else:
            threading.Thread(
                target=self.give_back, name="rdzv-etcd environment", daemon=True
            ).start()

    @property
    def is_over(self) -> bool:
        return self._launch is not None and not self._launch.goes_on


def full_environment() -> Mapping[str, str]:
    """The process's environment, as the user gave it."""
    with _lock:
        # Name by name: other threads may take some out meanwhile.
        found = {name: os.environ.get(name) for name in list(os.environ)}
        for name, value in _given.items():
            if found.get(name) == _put.get(name):
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


def _forget_launches_that_are_over() -> None:
    """torch does not end one that is interrupted, and a notebook may keep its node."""
    _in_use[:] = [each for each in _in_use if not each.is_over]


def _have_a_lock_of_ones_own() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent's may have held it
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_have_a_lock_of_ones_own)


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


_numbers = itertools.count(1)
_last: dict[int, int] = {}
"""By thread: the launch that it began last."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of torch's ``launch_agent``. A thread runs one at a time."""

    thread: int
    number: int

    @property
    def goes_on(self) -> bool:
        """Whether it is not over, however it ended."""
        is_last = _last.get(self.thread) == self.number
        return is_last and _launch_of(sys._current_frames().get(self.thread)) is not None


_nodes: dict[tuple[str, str], list[tuple[Launch, weakref.ref[Group]]]] = {}
"""By etcd and job: the nodes of launches."""


def begin_launch(settings: Settings) -> Launch | None:
    """If a launch begins here, let the nodes of the same job leave that earlier launches in this
    process left behind, in whatever thread. Blocks as ``Group.leave``."""
    if _launch_of(sys._getframe()) is None:
        return None
    launch = Launch(threading.get_ident(), next(_numbers))
    _last[launch.thread] = launch.number
    noted = _nodes.pop(_place(settings), [])
    for earlier, group in noted:
        node = group()
        if node is None or node.has_left:
            continue
        if earlier.goes_on:
            note_launch(settings, earlier, node)
            continue
        _log.warning(
            "the previous launch of job %r in this process was interrupted: its node, %s, leaves "
            "now",
            settings.job_id,
            node.node_id,
        )
        node.leave("its launch was interrupted")
    return launch


def check_log_folder(job_id: str) -> None:
    """Raise SettingsError if torch cannot make the log folder of the launch that begins here, which
    it names after the job.

    torch makes it after the rendezvous: the other nodes would have stopped their workers by then,
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


def note_launch(settings: Settings, launch: Launch | None, group: Group) -> None:
    """Remember the node of a launch."""
    if launch is not None:
        _nodes.setdefault(_place(settings), []).append((launch, weakref.ref(group)))


def _place(settings: Settings) -> tuple[str, str]:
    return str(settings.connection), settings.job_id


def _launch_of(frame: FrameType | None) -> FrameType | None:
    """The frame of torch's ``launch_agent`` that ``frame`` was called from, if any."""
    while frame is not None and frame.f_code.co_name != "launch_agent":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.distributed.launcher.api":
        return None
    return frame
