"""Opens the connection to etcd that the settings describe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.settings import Settings

Connect = Callable[[], "Etcd | Awaitable[Etcd]"]
"""Makes the connection to etcd, on the library's event loop; may be asynchronous."""


async def open_etcd(settings: Settings, connect: Connect | None) -> Etcd:
    """Make the connection, on the library's event loop."""
    if connect is not None:
        made = connect()
        return await made if isinstance(made, Awaitable) else made
    from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

    return EtcdClient(settings.connection)
