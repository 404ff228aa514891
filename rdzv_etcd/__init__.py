"""Rendezvous on etcd v3 for torchrun (``--rdzv_backend=etcd3``) and other launchers.

Importing this package imports nothing else: torch loads the entry point in every process that
touches ``torch.distributed.elastic.rendezvous``, training workers included. The public names are
loaded when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rdzv_etcd import aio, errors
    from rdzv_etcd import torch as torch  # exported, though not in __all__
    from rdzv_etcd.etcd.client import EtcdClient
    from rdzv_etcd.protocol.events import (
        JobEnded,
        JobEvent,
        Joined,
        Missed,
        NodeLeft,
        NodeLost,
        NodeMissing,
        Snapshot,
        WorldFormed,
        WorldOver,
    )
    from rdzv_etcd.protocol.job_state import JobState, NodeState, Role, Stage
    from rdzv_etcd.protocol.model import Closure
    from rdzv_etcd.runtime.listener import Listener
    from rdzv_etcd.settings import (
        Connection,
        Credentials,
        Endpoint,
        JobSettings,
        Settings,
        Timing,
        Tls,
        parse_endpoints,
        settings_from_config,
    )
    from rdzv_etcd.world.connect import connect, observe
    from rdzv_etcd.world.group import Group, leave_all
    from rdzv_etcd.world.observer import JobEvents, Observer
    from rdzv_etcd.world.round_store import RoundStore
    from rdzv_etcd.world.world import Master, World, WorldMember
    from rdzv_etcd.world_change import (
        Expelled,
        Failed,
        Finished,
        Left,
        Lost,
        MovedOn,
        Waiting,
        WorldChange,
    )

__version__ = "0.1.0"

__all__ = [
    "Closure",
    "Connection",
    "Credentials",
    "Endpoint",
    "EtcdClient",
    "Expelled",
    "Failed",
    "Finished",
    "Group",
    "JobEnded",
    "JobEvent",
    "JobEvents",
    "JobSettings",
    "JobState",
    "Joined",
    "Left",
    "Listener",
    "Lost",
    "Master",
    "Missed",
    "MovedOn",
    "NodeLeft",
    "NodeLost",
    "NodeMissing",
    "NodeState",
    "Observer",
    "Role",
    "RoundStore",
    "Settings",
    "Snapshot",
    "Stage",
    "Timing",
    "Tls",
    "Waiting",
    "World",
    "WorldChange",
    "WorldFormed",
    "WorldMember",
    "WorldOver",
    "__version__",
    "aio",
    "connect",
    "errors",
    "leave_all",
    "observe",
    "parse_endpoints",
    "settings_from_config",
]
"""Not :mod:`rdzv_etcd.torch`: with ``import *`` it would take the place of torch, and a
program that looks at all names, as pydoc does, would load torch."""

_HOMES = {
    "rdzv_etcd.protocol.events": (
        "JobEnded",
        "JobEvent",
        "Joined",
        "Missed",
        "NodeLeft",
        "NodeLost",
        "NodeMissing",
        "Snapshot",
        "WorldFormed",
        "WorldOver",
    ),
    "rdzv_etcd.protocol.job_state": ("JobState", "NodeState", "Role", "Stage"),
    "rdzv_etcd.protocol.model": ("Closure",),
    "rdzv_etcd.world_change": (
        "Expelled",
        "Failed",
        "Finished",
        "Left",
        "Lost",
        "MovedOn",
        "Waiting",
        "WorldChange",
    ),
    "rdzv_etcd.etcd.client": ("EtcdClient",),
    "rdzv_etcd.world.connect": ("connect", "observe"),
    "rdzv_etcd.world.group": ("Group", "leave_all"),
    "rdzv_etcd.runtime.listener": ("Listener",),
    "rdzv_etcd.world.observer": ("JobEvents", "Observer"),
    "rdzv_etcd.world.round_store": ("RoundStore",),
    "rdzv_etcd.world.world": ("Master", "World", "WorldMember"),
}


def __getattr__(name: str) -> object:
    if name not in __all__ and name != "torch":
        raise AttributeError(f"module 'rdzv_etcd' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - see the module's docstring

    if name in ("aio", "errors", "torch"):
        return import_module(f"rdzv_etcd.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), "rdzv_etcd.settings")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
