"""Tell whether a host means the machine it is used on. The only look-up of names in this package.

The question is what the resolver makes of it, not how it is spelt: ``127.1`` and ``0x7f000001``
are addresses to every program on the machine.
"""

from __future__ import annotations

import ipaddress
import socket

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` can only mean the machine it is used on. May block for a look-up.

    A machine's own name does not, although Debian resolves it to 127.0.1.1 on the machine itself:
    to others it is that machine. A name that cannot be resolved does not, either.
    """
    name = host.lower().rstrip(".")
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):  # RFC 6761
        return True
    addresses = numeric_addresses(host)
    if not addresses:
        if name.partition(".")[0] == socket.gethostname().lower().partition(".")[0]:
            return False
        addresses = resolve(host)
    return bool(addresses) and all(is_loopback_address(address) for address in addresses)


def is_loopback_address(address: str) -> bool:
    """Tell it of an address in its usual form; one of IPv4 in IPv6 counts as what it stands for."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (parsed if mapped is None else mapped).is_loopback


def is_ours(family: int, address: tuple[object, ...]) -> bool:
    """Tell whether an interface of this machine has the address, as :func:`socket.getaddrinfo`
    gives it: the kernel refuses to bind any other."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def numeric_addresses(host: str) -> tuple[str, ...]:
    """Return the address that ``host`` writes in numbers, however; empty if it is a name."""
    return _look_up(host, socket.AI_NUMERICHOST)


def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of ``host``; empty if it cannot be resolved. May block."""
    return _look_up(host, 0)


def _look_up(host: str, flags: int) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
