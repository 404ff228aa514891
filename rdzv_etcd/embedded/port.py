"""What answers at an address, whose it is, and which addresses are this machine's.

Knows Linux's lists of sockets and etcd's pages over HTTP. Whoever may write a job's keys
decides where its workers connect: another user's etcd is not for us.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rdzv_etcd.embedded.request import ask, parsed
from rdzv_etcd.errors import EmbeddedEtcdError
from rdzv_etcd.settings import Connection, Endpoint
from rdzv_etcd.settings.hosts import is_loopback, is_ours
from rdzv_etcd.trust import (
    NO_TLS,
    ONLY_TLS,
    Certificates,
    make_certificates,
    secured,
    speaks_tls,
    why_refused,
)

_LISTENS = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


# --- what answers ---------------------------------------------------------------------------------


class PortAnswer(Enum):
    """What was found at an endpoint."""

    ETCD = "an etcd"
    NOTHING = "nothing listens there"
    SILENCE = "something accepts connections but does not answer"
    STRANGER = "something that is not etcd listens there"
    MISTRUST = "the etcd there cannot be used"


@dataclass(frozen=True, slots=True)
class Found:
    answer: PortAnswer
    detail: str = ""
    """For NOTHING: why there was no connection, in the system's words. For MISTRUST: why."""


def probe(endpoint: Endpoint, timeout_s: float, secret: str | None = None) -> Found:
    """Return what is at ``endpoint``; blocks for at most about thrice ``timeout_s``; never raises.

    A machine that cannot be resolved or reached counts as ``NOTHING``: it may come up yet. (Only
    the resolver keeps its own time.)

    Source: etcd serves ``/version`` on its client port without authentication in all 3.x versions.
    """
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    except ValueError:
        return Found(PortAnswer.NOTHING, f"{endpoint.host} is not a host name")
    except OSError as error:
        return Found(PortAnswer.NOTHING, (error.strerror or str(error)).lower())
    try:
        _, body = ask(secured(connection, endpoint.host, secret), "/version", timeout_s)
    except OSError as error:
        if why := why_refused(error):
            return Found(PortAnswer.MISTRUST, why)
        return _without_answer(endpoint, timeout_s, secret)
    except ValueError:
        return Found(PortAnswer.STRANGER)
    return _judge(body)


def _without_answer(endpoint: Endpoint, timeout_s: float, secret: str | None) -> Found:
    """Return what it is that may answer over TLS only, or without it only."""
    if secret is not None:
        plain = probe(endpoint, timeout_s)
        if plain.answer is PortAnswer.ETCD:
            return Found(PortAnswer.MISTRUST, NO_TLS)
        if plain.answer is not PortAnswer.MISTRUST:
            return plain
    else:
        with contextlib.suppress(OSError):
            if speaks_tls(endpoint.host, endpoint.port, timeout_s):
                return Found(PortAnswer.MISTRUST, ONLY_TLS)
    return Found(PortAnswer.SILENCE)  # an etcd that starts or ends does that


def _judge(body: bytes) -> Found:
    if b"HTTPS server" in body:  # what Go's TLS listener answers to plain http
        return Found(PortAnswer.MISTRUST, ONLY_TLS)
    try:
        page = parsed(body)
    except ValueError:
        return Found(PortAnswer.STRANGER)
    is_etcd = isinstance(page, dict) and "etcdserver" in page
    return Found(PortAnswer.ETCD if is_etcd else PortAnswer.STRANGER)


# --- whose it is ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PortListener:
    """A socket of this machine (network namespace) that accepts connections."""

    address: str
    """IPv4 in IPv6 as what it stands for."""
    uid: int


def listeners(port: int) -> tuple[PortListener, ...]:
    """Return what listens on ``port``; empty where the system does not say."""
    return tuple(found for table in _TABLES for found in _rows(table, port))


def reached_by(listener: PortListener, address: str) -> bool:
    """Return whether connections to ``address`` may get to ``listener``."""
    bound, asked = _plain(listener.address), _plain(address)
    if bound.is_unspecified:
        return bound.version == 6 or asked.version == 4  # :: also takes IPv4
    return bound == asked


def check_owner(endpoint: Endpoint, addresses: Iterable[str]) -> None:
    """Raise :class:`EmbeddedEtcdError` if what listens at our own ``addresses`` is another user's.

    If nothing is seen listening there, root has redirected the port, as root may.
    """
    own, me = tuple(addresses), os.geteuid()
    for listener in listeners(endpoint.port):
        uid = listener.uid
        if uid in (0, me) or not any(reached_by(listener, it) for it in own):
            continue  # these have power over this process anyway
        user = f"uid {uid}"
        with contextlib.suppress(KeyError):  # it has no name
            user = f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
        raise EmbeddedEtcdError(
            f"the etcd at {endpoint.target} belongs to another user ({user}), not to you (uid "
            f"{me}) or root: that user could control your workers. Choose another port in "
            "--rdzv-endpoint; to use this etcd all the same, leave out embed=1"
        )


def _rows(table: str, port: int) -> Iterable[PortListener]:
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return  # no such family, or not Linux
    for line in lines:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == _LISTENS and int(number, 16) == port:
            yield PortListener(_address(address), int(fields[7]))


def _address(text: str) -> str:
    """The kernel prints an address as 32-bit numbers in the machine's byte order."""
    words = (int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return str(_plain(str(ipaddress.ip_address(packed))))


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IPv4 in IPv6 is what it stands for, to the kernel as well."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return parsed if mapped is None else mapped


# --- which addresses ------------------------------------------------------------------------------


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


def listen_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses of this machine at which ``host`` is served; empty if it is another.

    May block for a name look-up.
    """
    return reachable(host, own_addresses(host))


def reachable(host: str, own: tuple[str, ...]) -> tuple[str, ...]:
    """Return where ``host`` is reached that has its ``own`` addresses here.

    That is all interfaces where others may resolve the name to an address that it does not have
    here (Debian maps a host's own name to 127.0.1.1), or etcd takes no such address (link-local).
    """
    if not any(map(_is_only_ours, own)) or is_loopback(host):
        return own
    return ("::" if any(":" in address for address in own) else "0.0.0.0",)


def _is_only_ours(address: str) -> bool:
    parsed = _plain(address)
    return parsed.is_loopback or (parsed.version == 6 and parsed.is_link_local)


def listen_urls(addresses: Iterable[str], port: int, scheme: str) -> tuple[str, ...]:
    return tuple(f"{scheme}://{Endpoint(address, port).target}" for address in addresses)


def certificates_at(connection: Connection, addresses: Iterable[str]) -> Certificates | None:
    """Make what an etcd takes that is reached by these endpoints, at this machine's ``addresses``
    or by its name; ``None`` without a secret. Raises :class:`SettingsError`."""
    if connection.secret is None:
        return None
    named, here = {endpoint.host for endpoint in connection.endpoints}, socket.gethostname()
    names = {"localhost", "127.0.0.1", "::1", here, here.partition(".")[0], *named, *addresses}
    # Of a cluster all know the same names; one host may be named in short or in full.
    for host in {here, *named} if len(named) == 1 else ():
        with contextlib.suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, flags=socket.AI_CANONNAME)
            names |= {entry[3] for entry in found if entry[3]}
    return make_certificates(connection.secret, names)
