"""An in-memory etcd and a deterministic event loop, for your own tests.

    async with MemoryEtcd() as server:
        etcd = server.connect()          # implements rdzv_etcd.etcd.port.Etcd
        etcd.link.partition()            # faults: see Link and MemoryEtcd

    with EtcdContainer() as server:    # a real one, if testcontainers is installed
        endpoint = server.endpoint

Knows etcd's behaviour and its faults; nothing of rendezvous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdzv_etcd.testing.checks import Limits
from rdzv_etcd.testing.connection import MemoryConnection
from rdzv_etcd.testing.model import Model
from rdzv_etcd.testing.network import Link
from rdzv_etcd.testing.server import Applied, MemoryEtcd
from rdzv_etcd.testing.simloop import (
    DeadlockError,
    SimClock,
    SimLoop,
    SimulationError,
    SimulationTimeoutError,
    run_simulation,
)
from rdzv_etcd.testing.watch import MemoryWatch

if TYPE_CHECKING:
    from rdzv_etcd.testing.container import EtcdContainer

__all__ = [
    "Applied",
    "DeadlockError",
    "EtcdContainer",
    "Limits",
    "Link",
    "MemoryConnection",
    "MemoryEtcd",
    "MemoryWatch",
    "Model",
    "SimClock",
    "SimLoop",
    "SimulationError",
    "SimulationTimeoutError",
    "run_simulation",
]


def __getattr__(name: str) -> Any:
    """Import what needs testcontainers only when it is asked for."""
    if name == "EtcdContainer":
        from rdzv_etcd.testing.container import EtcdContainer  # noqa: PLC0415

        return EtcdContainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
