"""Nodes that an interrupted launch of torch's left behind in this process.

After a ``SignalException`` torch's ``launch_agent`` does not call ``shutdown()``, and in a notebook
the traceback that is kept keeps the handler as well. Such a node would stay a member, and the cell,
if run again, would wait for it.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from dataclasses import dataclass
from types import FrameType

from rdzv_etcd.group.group import Group
from rdzv_etcd.settings import Settings

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
        return is_last and _is_in_launch(sys._current_frames().get(self.thread))


_nodes: dict[tuple[str, str], list[tuple[Launch, weakref.ref[Group]]]] = {}
"""By etcd and job: the nodes of launches."""


def begin_launch(settings: Settings) -> Launch | None:
    """If a launch begins here, let the nodes of the same job leave that earlier launches in this
    process left behind, in whatever thread. Blocks as ``Group.leave``."""
    if not _is_in_launch(sys._getframe()):
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


def note_launch(settings: Settings, launch: Launch | None, group: Group) -> None:
    """Remember the node of a launch."""
    if launch is not None:
        _nodes.setdefault(_place(settings), []).append((launch, weakref.ref(group)))


def _place(settings: Settings) -> tuple[str, str]:
    return str(settings.connection), settings.job_id


def _is_in_launch(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "launch_agent":
            return frame.f_globals.get("__name__") == "torch.distributed.launcher.api"
        frame = frame.f_back
    return False
