"""Whose etcd it is that answers, and whether it knows our password.

Knows Linux's lists of sockets and etcd's JSON gateway. Whoever may write a job's keys tells its
workers where to connect: another user's etcd is not for us.
"""

from __future__ import annotations

import ipaddress
import json
import os
import pwd
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rdzv_etcd.embedded.http import MalformedReplyError, ask, connect
from rdzv_etcd.errors import EmbeddedEtcdError, EtcdAuthError
from rdzv_etcd.settings import Connection, Credentials, Endpoint

_LISTENS = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of this machine (network namespace) that accepts connections."""

    address: str
    """IPv4 in IPv6 as what it stands for."""
    uid: int


def is_trusted(uid: int) -> bool:
    """Tell whether processes of ``uid`` may do with us what they like anyway."""
    return uid in (0, os.geteuid())


def user_of(uid: int) -> str:
    """Return ``user 'ann' (uid 1000)``, or only the number if it has no name."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r} (uid {uid})"
    except KeyError:
        return f"a user with uid {uid}"


def listeners(port: int) -> tuple[Listener, ...]:
    """Return who listens on ``port``; empty where the system does not tell."""
    return tuple(found for table in _TABLES for found in _rows(table, port))


def reached_by(listener: Listener, address: str) -> bool:
    """Tell whether connections to ``address`` may get to ``listener``."""
    bound, asked = _plain(listener.address), _plain(address)
    if bound.is_unspecified:
        return bound.version == 6 or asked.version == 4  # :: takes IPv4, too
    return bound == asked


def check_owner(endpoint: Endpoint, addresses: Iterable[str]) -> None:
    """Raise :class:`EmbeddedEtcdError` if what listens at our own ``addresses`` is another user's.

    If nothing is seen listening there, root has redirected the port, as root may.
    """
    own = tuple(addresses)
    for listener in listeners(endpoint.port):
        if is_trusted(listener.uid) or not any(reached_by(listener, it) for it in own):
            continue
        raise EmbeddedEtcdError(
            f"the etcd at {endpoint.target} belongs to {user_of(listener.uid)}, not to you "
            f"(uid {os.geteuid()}) or root: whoever runs it could control your workers. Choose "
            "another port in --rdzv-endpoint; to use this etcd all the same, leave out embed=1"
        )


def check_password(connection: Connection, timeout_s: float) -> None:
    """Raise if the etcd there and ``connection`` do not agree on a user and password.

    :class:`EtcdAuthError` if etcd refuses; :class:`EmbeddedEtcdError` if we have a password and
    etcd lets everybody in. An etcd that does not tell (no gateway, just ending) is left to the
    client. Blocks for about ``timeout_s`` at most.
    """
    credentials, where = connection.credentials, str(connection)
    answer = _authenticate(connection.endpoints[0], credentials, timeout_s)
    if "authentication is not enabled" in answer:
        if credentials is None:
            return
        raise EmbeddedEtcdError(
            f"the etcd at {where} lets everybody in, although a user and password are given here: "
            "the node that started it had none. Give every node the same, and wait until that etcd "
            "has ended, or choose another port in --rdzv-endpoint"
        )
    if "authentication failed" not in answer and "user name is empty" not in answer:
        return
    if credentials is None:
        raise EtcdAuthError(
            f"the etcd at {where} requires a user and password: set RDZV_ETCD_USER and "
            "RDZV_ETCD_PASSWORD (or user_file and password_file) as on the node that started it"
        )
    raise EtcdAuthError(
        f"the etcd at {where} refused the password or the user {credentials.user!r}: every node "
        "needs those of the node that started it"
    )


def _authenticate(endpoint: Endpoint, credentials: Credentials | None, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    name, password = ("", "") if credentials is None else (credentials.user, credentials.password)
    body = json.dumps({"name": name, "password": password})
    try:
        with connect(endpoint.host, endpoint.port, deadline) as connection:
            reply = ask(connection, "POST", "/v3/auth/authenticate", body, deadline=deadline)
    except (OSError, UnicodeError, MalformedReplyError):
        return ""
    return "" if reply.status == 200 else reply.body.decode(errors="replace")


def _rows(table: str, port: int) -> Iterable[Listener]:
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return  # no such family, or not Linux
    for line in lines:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == _LISTENS and int(number, 16) == port:
            yield Listener(_address(address), int(fields[7]))


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
