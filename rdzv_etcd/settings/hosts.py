"""Look up names: which addresses they have, and whether that is the machine they are used on.

The latter question is what the resolver makes of it, not how it is spelt: ``127.1`` and
``0x7f000001`` are addresses to every program on the machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rdzv_etcd.log import watched

SocketAddress: TypeAlias = "tuple[int, tuple[object, ...]]"
"""An address family and an address as sockets take them."""

_AGAIN_S = 1.0
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def is_loopback(host: str, *, look_up: bool = True) -> bool:
    """Return whether ``host`` can only mean the machine it is used on.

    May block for a look-up, unless only what is certain without one counts.

    ``0.0.0.0`` and ``::`` do: a connection to them ends on the same machine.
    A machine's own name does not, although Debian resolves it to 127.0.1.1 on the machine itself:
    to others it is that machine. A name that cannot be resolved does not, either.
    """
    name = host.lower().rstrip(".")
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):  # RFC 6761
        return True
    addresses = _addresses(host, socket.AI_NUMERICHOST)  # in numbers, however they are written
    if not addresses:
        if not look_up or name.partition(".")[0] == socket.gethostname().lower().partition(".")[0]:
            return False
        addresses = resolve(host)
    return bool(addresses) and all(map(_stays_here, addresses))


def is_loopback_address(address: str) -> bool:
    """Return whether an address in its usual form is loopback; IPv4 in IPv6 counts as IPv4."""
    parsed = _parse(address)
    return parsed is not None and parsed.is_loopback


def _stays_here(address: str) -> bool:
    parsed = _parse(address)
    return parsed is not None and (parsed.is_loopback or parsed.is_unspecified)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(parsed, "ipv4_mapped", None)
    return parsed if mapped is None else mapped


def is_ours(family: int, address: tuple[object, ...]) -> bool:
    """Return whether an interface of this machine has the address, as :func:`socket.getaddrinfo`
    gives it: the kernel refuses to bind any other."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of ``host``; empty if it cannot be resolved. May block."""
    return _addresses(host, 0)


def wait_for_name(
    hosts: Sequence[str], limit_s: float, report: Callable[[float, str], None]
) -> list[SocketAddress]:
    """Return the addresses of the first of ``hosts`` that has any; if none is in DNS yet, try again
    for ``limit_s`` seconds.

    ``report`` is called now and then meanwhile, with the seconds waited and the resolver's error.
    Signal handlers run while this blocks. Raises OSError, and UnicodeError at once for what cannot
    be a name.
    """
    with contextlib.suppress(OSError, UnicodeError):
        return _first_found(hosts, socket.AI_NUMERICHOST)
    began_s = time.monotonic()
    problem: Exception = OSError("no answer from the name server")
    given_up = threading.Event()

    def look() -> list[SocketAddress]:
        nonlocal problem
        while True:
            try:
                return _first_found(hosts)
            except OSError as error:
                problem = error
                is_last = time.monotonic() - began_s + _AGAIN_S >= limit_s
                if is_last or given_up.wait(_AGAIN_S):  # nothing announces a new name
                    raise

    try:
        return watched(look, lambda s: report(s, str(problem)), "rdzv-etcd name look-up")
    finally:
        given_up.set()


def _first_found(hosts: Sequence[str], flags: int = 0) -> list[SocketAddress]:
    for host in hosts[:-1]:
        with contextlib.suppress(OSError, UnicodeError):
            return _look_up(host, flags)
    return _look_up(hosts[-1], flags)


def _look_up(host: str, flags: int = 0) -> list[SocketAddress]:
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, _, _, _, target in infos]


def _addresses(host: str, flags: int) -> tuple[str, ...]:
    try:
        found = _look_up(host, flags)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(target[0]) for _, target in found))
