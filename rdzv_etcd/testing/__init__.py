"""An in-memory etcd and a deterministic event loop, for your own tests.

    async with MemoryEtcd() as server:
        etcd = server.connect()          # implements rdzv_etcd.etcd.port.Etcd
        etcd.link.partition()            # faults: see Link and MemoryEtcd

Knows etcd's behaviour and its faults; nothing of rendezvous.
"""

from __future__ import annotations

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

__all__ = [
    "Applied",
    "DeadlockError",
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
