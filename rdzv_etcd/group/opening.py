"""Opens the connection to etcd that the settings describe, or that somebody lends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.etcd.api import Etcd
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

Connect = Callable[[], "Etcd | Awaitable[Etcd]"]
"""Makes the connection to etcd, on the library's event loop; may be asynchronous."""


async def open_etcd(settings: Settings, connect: Connect | None) -> Etcd:
    """Make the connection, on the library's event loop."""
    if connect is not None:
        made = connect()
        return await made if isinstance(made, Awaitable) else made
    from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

    return EtcdClient(settings.connection)


def lent(client: Any) -> Connect | None:
    """Use a client of the package etcd3 that the caller lends, and leaves open until the end;
    ``None`` for none."""
    if client is None:
        return None

    def connect() -> Etcd:
        from rdzv_etcd.etcd.client import EtcdClient  # noqa: PLC0415 - grpc is loaded only here

        return EtcdClient.from_etcd3(client)

    return connect


def endpoint_of(client: Any) -> str:
    """Where a client of the package etcd3 is connected to. Raises SettingsError if it is none."""
    url = getattr(client, "_url", None)
    if isinstance(url, str) and all(hasattr(client, name) for name in ("channel", "metadata")):
        return url
    raise SettingsError(
        f"etcd is {shown(repr(client), 100)}; it must be a client of the package etcd3, as "
        "etcd3.client(host, port) returns it"
    )
