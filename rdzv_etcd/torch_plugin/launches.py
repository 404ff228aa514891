"""Nodes that an interrupted launch of torch's left behind in this process.

After a ``SignalException`` torch's ``launch_agent`` does not call ``shutdown()``, and in a notebook
the traceback that is kept keeps the handler as well. Such a node would stay a member, and the cell,
if run again, would wait for it.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType

from rdzv_etcd.group.group import Group
from rdzv_etcd.settings import Settings

_log = logging.getLogger("rdzv_etcd")

_TORCHRUN = str(Path("torch", "distributed", "run.py"))

_nodes: dict[tuple[str, str], list[tuple[int, weakref.ref[Group]]]] = {}
"""By etcd and job: the nodes of launches, with the thread that began each."""


def end_interrupted_launch(settings: Settings) -> None:
    """If a launch begins here, let the nodes of the same job leave that earlier launches in this
    process left behind, in whatever thread.

    A thread runs one launch at a time, so this one's last is over. Blocks as ``Group.leave``.
    """
    if not _is_in_launch(sys._getframe()):
        return
    noted = _nodes.pop(_place(settings), [])
    going_on = [(thread, group) for thread, group in noted if _goes_on(thread)]
    if going_on:
        _nodes[_place(settings)] = going_on
    for thread, group in noted:
        left_over = group()
        if (thread, group) in going_on or left_over is None or left_over.has_left:
            continue
        _log.warning(
            "the previous launch of job %r in this process was interrupted: its node, %s, leaves "
            "now",
            settings.job_id,
            left_over.node_id,
        )
        left_over.leave("its launch was interrupted")


def note_launch(settings: Settings, group: Group) -> None:
    """Remember the node of the launch that begins here, if one does."""
    if _is_in_launch(sys._getframe()):
        noted = _nodes.setdefault(_place(settings), [])
        noted.append((threading.get_ident(), weakref.ref(group)))


def is_in_torchrun() -> bool:
    """Whether this thread runs torchrun, or what calls its functions: a process that is there for
    one launch, and whose exit code tells how it went."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_TORCHRUN):
            return True
        frame = frame.f_back
    return False


def _place(settings: Settings) -> tuple[str, str]:
    return str(settings.connection), settings.job_id


def _goes_on(thread: int) -> bool:
    """Whether the last launch of a thread is not over."""
    return thread != threading.get_ident() and _is_in_launch(sys._current_frames().get(thread))


def _is_in_launch(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "launch_agent":
            return frame.f_globals.get("__name__") == "torch.distributed.launcher.api"
        frame = frame.f_back
    return False
