"""Opens the three stores that are compared, as torch's agents would hold them.

Knows their constructors; what is done with them is in :mod:`benchmarks.store_work`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

OURS, TORCH_ETCD, TCP = "EtcdStore", "torch EtcdStore", "TCPStore"
STORES = (OURS, TORCH_ETCD, TCP)
_LEASE_TTL_S = 600


class OurClients:
    """All agents of a process share one connection, and one store on it, which is thread-safe."""

    def __init__(self, endpoint: str, job: str, timeout: timedelta) -> None:
        from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415
        from rdzv_etcd.etcd.port import Txn  # noqa: PLC0415 - only who uses it pays
        from rdzv_etcd.protocol.keys import JobKeys  # noqa: PLC0415
        from rdzv_etcd.protocol.store import StoreKeys  # noqa: PLC0415
        from rdzv_etcd.runtime.loop_thread import LoopHold  # noqa: PLC0415
        from rdzv_etcd.settings.connection import Connection, Endpoint  # noqa: PLC0415
        from rdzv_etcd.torch_plugin.store import EtcdStore  # noqa: PLC0415
        from rdzv_etcd.world.round_store import RoundStore  # noqa: PLC0415

        host, _, port = endpoint.rpartition(":")
        self._loop_thread = LoopHold.acquire()

        async def connect() -> tuple[EtcdClient, int]:
            client = EtcdClient(Connection((Endpoint(host, int(port)),)))
            await client.connect()
            lease_id = (await client.grant(_LEASE_TTL_S)).lease_id
            await client.txn(Txn((), (StoreKeys(keys).begin(lease_id),)), repeatable=True)
            return client, lease_id

        keys = JobKeys("/bench", job).store(1, "bench")
        self._etcd, lease_id = self._loop_thread.run(connect())
        store = RoundStore(self._etcd, self._loop_thread, keys, lease_id)
        self._store = EtcdStore(store, timeout=timeout)

    def open(self) -> Any:
        return self._store

    def close(self) -> None:
        self._loop_thread.run(self._etcd.close())
        self._loop_thread.release()


class TorchEtcdClients:
    """Every agent has a client of its own."""

    def __init__(self, endpoint: str, job: str, timeout: timedelta) -> None:
        host, _, port = endpoint.rpartition(":")
        self._where = (host, int(port))
        self._prefix = f"/bench/{job}"
        self._timeout = timeout

    def open(self) -> Any:
        import etcd  # type: ignore[import-untyped]  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous.etcd_store import (  # noqa: PLC0415
            EtcdStore,
        )

        host, port = self._where
        client = etcd.Client(host=host, port=port, allow_reconnect=True)
        return EtcdStore(client, self._prefix, timeout=self._timeout)

    def close(self) -> None:
        """Its connections end with the process."""


class TcpClients:
    """Every agent has a connection of its own: a client blocks all its callers while one waits."""

    def __init__(self, endpoint: str, hosts: bool, timeout: timedelta) -> None:
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

        host, _, port = endpoint.rpartition(":")

        def connect(is_master: bool) -> TCPStore:
            return TCPStore(host, int(port), None, is_master, timeout, wait_for_workers=False)

        self._connect = connect
        self._served = connect(True) if hosts else None

    def open(self) -> Any:
        return self._connect(False)

    def close(self) -> None:
        self._served = None


def open_clients(kind: str, endpoint: str, job: str, index: int, limit_s: float) -> Any:
    """Return process ``index``'s way to a store; the first one hosts a ``TCPStore``."""
    timeout = timedelta(seconds=limit_s)
    makers: dict[str, Callable[[], Any]] = {
        OURS: lambda: OurClients(endpoint, job, timeout),
        TORCH_ETCD: lambda: TorchEtcdClients(endpoint, job, timeout),
        TCP: lambda: TcpClients(endpoint, index == 0, timeout),
    }
    return makers[kind]()
