"""The listening socket and the address that a node offers for the round's store.

Knows sockets and routes; knows nothing of torch, of etcd's protocol or of rounds. Nothing is sent
over the network here: connecting a datagram socket only asks the kernel which route it would take.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.model import Endpoint

_log = logging.getLogger(__name__)

_Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_BACKLOG = 4096
"""Workers of all nodes may connect before the store serves; the kernel caps it at somaxconn."""

# Documentation addresses (RFC 5737, RFC 3849): no network has them, so the default route matches.
_BEYOND_DEFAULT_ROUTE = (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET6, "2001:db8::1"),
)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A listening socket and the address at which other nodes reach it."""

    address: str
    port: int
    socket: socket.socket

    def detach(self) -> int:
        """Hand the socket's descriptor over to the caller, who closes it from now on."""
        if self.socket.fileno() < 0:
            raise ValueError("the bootstrap socket is closed or handed over already")
        return self.socket.detach()

    def close(self) -> None:
        """Give the port back; does nothing after :meth:`detach` or a first close."""
        self.socket.close()


def bind_bootstrap(local_addr: str | None, endpoints: Sequence[Endpoint]) -> Bootstrap:
    """Listen on a free port and find this node's address.

    ``local_addr`` is taken as it is. Without one the address is that from which this host reaches
    etcd; if that is a loopback address (etcd may be a sidecar), the address of the default route.

    Blocks while names are resolved. Raises :class:`~rdzv_etcd.errors.SettingsError` if
    ``local_addr`` cannot be an address of this node, :class:`OSError` if no port can be had.
    """
    address = _find_address(endpoints) if local_addr is None else _check_local_addr(local_addr)
    listener = _listen()
    return Bootstrap(address, listener.getsockname()[1], listener)


# --- the address ----------------------------------------------------------------------------------


def _find_address(endpoints: Sequence[Endpoint]) -> str:
    sources = [source for endpoint in endpoints for source in _sources_towards(endpoint)]
    for source in sources:
        if not source.is_loopback:
            return str(source)
    for family, beyond in _BEYOND_DEFAULT_ROUTE:
        default = _source_address(family, (beyond, 9))
        if default is not None and not default.is_loopback:
            return str(default)
    return str(sources[0]) if sources else "127.0.0.1"


def _sources_towards(endpoint: Endpoint) -> list[_Address]:
    try:
        infos = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    except OSError as error:
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


def _check_local_addr(local_addr: str) -> str:
    """Return ``local_addr`` without IPv6 brackets, or raise SettingsError."""
    text = local_addr.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    literal = _parse(text)
    if not text or "/" in text or (literal is None and ":" in text):
        raise SettingsError(
            f"local_addr is {local_addr!r}; it must be a bare host name or IP address, without "
            "scheme or port"
        )
    if literal is not None:
        _refuse_unusable(local_addr, literal)
    resolved = _resolve(local_addr, text)
    if not any(_is_ours(family, address) for family, address in resolved):
        # Behind address translation the others know this node by an address it does not have.
        _log.warning(
            "local_addr %s (%s) is not an address of this host; the other nodes are told to use it",
            text,
            ", ".join(sorted({str(address[0]) for _, address in resolved})),
        )
    return text


def _refuse_unusable(local_addr: str, literal: _Address) -> None:
    if literal.is_unspecified or literal.is_multicast:
        raise SettingsError(f"local_addr is {local_addr!r}; nobody can connect to that address")
    scope = getattr(literal, "scope_id", None)
    if literal.is_link_local and literal.version == 6 and scope is None:
        raise SettingsError(
            f"local_addr is {local_addr!r}, a link-local address without a scope (%interface); "
            "give a routable one"
        )


def _resolve(local_addr: str, text: str) -> list[tuple[int, tuple[object, ...]]]:
    try:
        infos = socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"local_addr is {local_addr!r}, which this host cannot resolve ({error}); its own "
            "workers have to connect to it as well"
        ) from error
    return [(family, target) for family, _, _, _, target in infos]


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


# --- the socket -----------------------------------------------------------------------------------


def _listen() -> socket.socket:
    """Listen on every address of this host, v4 and v6 if it has both.

    Without SO_REUSEADDR: with it the kernel may give out a port that somebody else has bound but
    does not listen on yet. Python's sockets are not inherited by children, and TCPStore needs the
    descriptor only in this process.
    """
    if socket.has_dualstack_ipv6():
        try:
            return _listen_on(socket.AF_INET6, "::")
        except OSError as error:
            _log.debug("no IPv6 listener (%s), using IPv4 only", error)
    return _listen_on(socket.AF_INET, "0.0.0.0")


def _listen_on(family: int, wildcard: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((wildcard, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
