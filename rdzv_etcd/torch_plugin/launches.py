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

from rdzv_etcd.group.group import Group
from rdzv_etcd.settings import Settings

_log = logging.getLogger("rdzv_etcd")

_nodes: dict[tuple[int, str, str], weakref.ref[Group]] = {}
"""By thread, etcd and job: the node of the launch that the thread began last."""


def end_interrupted_launch(settings: Settings) -> None:
    """If a launch begins here, let the node leave that this thread's previous launch left behind.

    A thread runs one launch at a time, so that one is over. Blocks as ``Group.leave``.
    """
    if not _in_launch():
        return
    left_over = _nodes.pop(_place(settings), lambda: None)()
    if left_over is not None and not left_over.has_left:
        _log.warning(
            "the previous launch of job %r in this process was interrupted: its node, %s, leaves "
            "now",
            settings.job_id,
            left_over.node_id,
        )
        left_over.leave("its launch was interrupted")


def note_launch(settings: Settings, group: Group) -> None:
    """Remember the node of the launch that begins here, if one does."""
    if _in_launch():
        _nodes[_place(settings)] = weakref.ref(group)


def _place(settings: Settings) -> tuple[int, str, str]:
    return threading.get_ident(), str(settings.connection), settings.job_id


def _in_launch() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "launch_agent":
            return frame.f_globals.get("__name__") == "torch.distributed.launcher.api"
    return False
