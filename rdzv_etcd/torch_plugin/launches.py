"""The launch of torch's that a handler is made for, and nodes that earlier ones left behind.

After a ``SignalException`` torch's ``launch_agent`` does not call ``shutdown()``, and in a notebook
the traceback that is kept keeps the handler as well. Such a node would stay a member, and the cell,
if run again, would wait for it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown
from rdzv_etcd.world.group import Group

_log = logging.getLogger("rdzv_etcd")

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
