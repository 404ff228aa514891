"""The listening socket and the address that a node offers for the round's store.

Knows sockets and routes; knows nothing of torch, of etcd's protocol or of rounds. Names are looked
up here; nothing else is sent, as connecting a datagram socket only asks the kernel for the route.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import Endpoint
from rdzv_etcd.settings.hosts import SocketAddress, is_loopback, is_ours, wait_for_name

_log = logging.getLogger("rdzv_etcd")

_Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_NUMBERS = re.compile(r"[\d.]+")
"""No name is like this, but an address that is none may be."""
_BACKLOG = 4096
"""Workers of all nodes may connect before the store serves; the kernel caps it at somaxconn."""

# Documentation addresses (RFC 5737, RFC 3849): no network has them, so the default route matches.
_BEYOND_DEFAULT_ROUTE = (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET6, "2001:db8::1"),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the address at which other nodes reach it."""

    address: str
    port: int
    socket: socket.socket
    own_address: str = "127.0.0.1"
    """Where this process reaches it: ``address`` may lead through a NAT that does not lead back."""

    def detach(self) -> int:
        """Hand the socket's descriptor over to the caller, who closes it from now on."""
        if self.socket.fileno() < 0:
            raise ValueError("the listening socket has already been closed or handed over")
        return self.socket.detach()

    def close(self) -> None:
        """Give the port back; does nothing after :meth:`detach` or a first close."""
        self.socket.close()


def bind_listener(local_addr: LocalAddr | None, endpoints: Sequence[Endpoint]) -> Listener:
    """Listen on a free port, at ``local_addr`` if one was given.

    Without one the address is that from which this host reaches etcd; if that is a loopback address
    (etcd may be a sidecar), the address of the default route. Then this blocks while the names of
    ``endpoints`` are resolved. Raises :class:`OSError` if no port can be had.
    """
    if local_addr is None:
        address, only = _find_address(endpoints), None
    else:
        address, only = local_addr.address, local_addr.only
    listener = _listen() if only is None else _listen_on(*only)
    own_address = "127.0.0.1" if only is None else str(only[1][0])
    return Listener(address, listener.getsockname()[1], listener, own_address)


def looks_up_names(local_addr: LocalAddr | None, endpoints: Sequence[Endpoint]) -> bool:
    """Whether :func:`bind_listener` resolves names, which may block."""
    return local_addr is None and any(_parse(endpoint.host) is None for endpoint in endpoints)


def bind_beside(listener: Listener) -> socket.socket:
    """Listen on another free port at the same addresses. Raises :class:`OSError`."""
    place = listener.socket.getsockname()
    return _listen_on(listener.socket.family, (place[0], 0, *place[2:]))


def still_found(address: str) -> LocalAddr | None:
    """Return an address that :func:`bind_listener` has found before, if this host still has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return LocalAddr(address) if is_ours(family, (address, 0)) else None


def loopback_problem(listener: Listener, endpoints: Sequence[Endpoint]) -> str | None:
    """Tell what is wrong if the address is one that other hosts take for themselves.

    It is not if etcd, too, is reached over loopback: then all nodes are on this host.
    """
    if not is_loopback(listener.address):
        return None
    for endpoint in endpoints:
        for source in _sources_towards(endpoint):
            if not source.is_loopback:
                return (
                    f"the other nodes would connect to this one at {listener.address}, which on "
                    f"every host means that host itself; this one reaches etcd at "
                    f"{endpoint.target} from {source}: omit --local-addr, or give that address, if "
                    "there are nodes on other hosts"
                )
    return None


def master_problem(master: str, own: str) -> str | None:
    """Tell what is wrong if one of two nodes' addresses is loopback and the other is not."""
    if master == own or is_loopback(master, look_up=False) == is_loopback(own, look_up=False):
        return None
    return (
        f"the address of rank 0 is {master}, that of this node {own}: one of them is a loopback "
        "address, which on every host means that host itself, so workers on different hosts cannot "
        "find each other; see --local-addr"
    )


# --- the address ----------------------------------------------------------------------------------


def _find_address(endpoints: Sequence[Endpoint]) -> str:
    sources = []
    for endpoint in endpoints:
        for source in _sources_towards(endpoint):
            if not source.is_loopback:
                return str(source)
            sources.append(source)
    for family, beyond in _BEYOND_DEFAULT_ROUTE:
        default = _source_address(family, (beyond, 9))
        if default is not None and not default.is_loopback:
            return str(default)
    return str(sources[0]) if sources else "127.0.0.1"


def _sources_towards(endpoint: Endpoint) -> list[_Address]:
    try:
        infos = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name can be like that
        # Not fatal here: connecting to etcd fails with a better message.
        _log.debug("cannot resolve etcd endpoint %s: %s", endpoint.target, error)
        return []
    found = (_source_address(family, target) for family, _, _, _, target in infos)
    return [source for source in found if source is not None]


def _source_address(family: int, target: tuple[object, ...]) -> _Address | None:
    """Return the address from which ``target`` would be reached, ``None`` without a usable route.

    A link-local address means nothing on another host, so it does not count.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            source = _parse(probe.getsockname()[0])
    except OSError:  # no route, or the family is not available
        return None
    if source is None or source.is_link_local or source.is_unspecified:
        return None
    return source


def _parse(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


# --- --local-addr ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalAddr:
    """An address that a node uses as its own, whether it was given or found before."""

    address: str
    only: SocketAddress | None = None
    """Where alone the node listens, if that is known."""


def check_local_addr(local_addr: str, patience_s: float = 0.0) -> LocalAddr:
    """Look at what the user gave as this node's address, which is taken as it is.

    An IP address that this host has is the only one where it listens, and ``localhost`` is
    loopback. (A name may mean another address to other hosts.) The name of a pod or a machine that
    has just started may not be in DNS yet: that is waited for, for ``patience_s`` seconds, with a
    WARNING now and then. Raises :class:`~rdzv_etcd.errors.SettingsError` if it cannot be an address
    of this node.
    """
    text = local_addr.strip()
    literal = _parse(text)
    if not text or "/" in text or (literal is None and ":" in text):
        raise SettingsError(
            f"local_addr is {local_addr!r}; it must be a bare host name or IP address, without "
            "scheme or port"
        )
    if literal is not None:
        _refuse_unusable(local_addr, literal)
    resolved = _resolve(local_addr, text, 0.0 if _NUMBERS.fullmatch(text) else patience_s)
    ours = [place for place in resolved if is_ours(*place)]
    if not ours:
        # Behind address translation the others know this node by an address it does not have.
        _log.warning(
            "local_addr %s (%s) is not an address of this host, but the other nodes will use it",
            text,
            ", ".join(sorted({str(address[0]) for _, address in resolved})),
        )
    is_one = literal is not None or is_loopback(text)
    # Of two loopback addresses the one of IPv4: whoever looks the name up tries both.
    ours.sort(key=lambda place: place[0] != socket.AF_INET)
    return LocalAddr(text, ours[0] if ours and is_one else None)


def _refuse_unusable(local_addr: str, literal: _Address) -> None:
    if literal.is_unspecified or literal.is_multicast:
        raise SettingsError(f"local_addr is {local_addr!r}; no node can connect to that address")
    scope = getattr(literal, "scope_id", None)
    if literal.is_link_local and literal.version == 6 and scope is None:
        raise SettingsError(
            f"local_addr is {local_addr!r}, a link-local address without a scope (%interface); "
            "give a routable one"
        )


def _resolve(local_addr: str, text: str, patience_s: float) -> list[SocketAddress]:
    def tell(waited_s: float, problem: str) -> None:
        _log.warning(
            "waiting %d s (of %g) until this host can resolve its own name, local_addr %s: %s",
            waited_s,
            patience_s,
            text,
            problem,
        )

    try:
        return wait_for_name((text,), patience_s, tell)
    except (OSError, UnicodeError) as error:
        waited = f" within {patience_s:g} s" if patience_s else ""
        raise SettingsError(
            f"local_addr is {local_addr!r}, which this host cannot resolve{waited} ({error}); its "
            "own workers have to connect to it as well"
        ) from error


# --- the socket -----------------------------------------------------------------------------------


def _listen() -> socket.socket:
    """Listen on every address of this host, v4 and v6 if it has both.

    Without SO_REUSEADDR: with it the kernel may give out a port that somebody else has bound but
    does not listen on yet. Python's sockets are not inherited by children, and TCPStore needs the
    descriptor only in this process.
    """
    if socket.has_dualstack_ipv6():
        try:
            return _listen_on(socket.AF_INET6, ("::", 0))
        except OSError as error:
            _log.debug("no IPv6 listener (%s), using IPv4 only", error)
    return _listen_on(socket.AF_INET, ("0.0.0.0", 0))


def _listen_on(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
