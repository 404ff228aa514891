"""Which addresses are this machine's, and where an embedded etcd listens. Knows sockets only."""

from __future__ import annotations

import socket

from rdzv_etcd.settings import Endpoint
from rdzv_etcd.settings.hosts import is_loopback, is_ours


def own_addresses(host: str) -> tuple[str, ...]:
    """Return those addresses of ``host`` that this machine has; empty if none or not resolvable.

    May block for a name look-up.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    addresses = {str(entry[4][0]): entry for entry in found}
    return tuple(name for name, entry in addresses.items() if is_ours(entry[0], entry[4]))


def listen_urls(endpoint: Endpoint, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return where etcd must listen so that everyone who is given ``endpoint`` reaches it.

    A loopback endpoint stays private. Any other listens on all interfaces: the name may resolve
    elsewhere to another of this machine's addresses (Debian maps a host's own name to 127.0.1.1).
    """
    if is_loopback(endpoint.host):
        return tuple(_url(address, endpoint.port) for address in addresses)
    wildcard = "::" if any(":" in address for address in addresses) else "0.0.0.0"
    return (_url(wildcard, endpoint.port),)


def _url(address: str, port: int) -> str:
    return f"http://{Endpoint(address, port).target}"
