"""Whose etcd it is that answers, and whether it knows our password.

Knows Linux's lists of sockets and etcd's JSON gateway. Whoever may write a job's keys tells its
workers where to connect: another user's etcd is not for us.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rdzv_etcd.errors import EmbeddedEtcdError, EtcdAuthError
from rdzv_etcd.settings import Connection, Credentials, Endpoint
from rdzv_etcd.settings.hosts import is_loopback, is_ours

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


_WAITING = 1024
"""How many may ask between two calls of :func:`dismiss`; more only hear that it is taken."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock; ``None`` where the kernel does not tell."""

    pid: int | None = None
    uid: int | None = None


def take_lock(port: int) -> socket.socket:
    """Return the lock of ``port``, held until it is closed; raises OSError if it is taken."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_name(port))
        lock.listen(_WAITING)
        lock.setblocking(False)
    except OSError:
        lock.close()
        raise
    return lock


def dismiss(lock: socket.socket) -> None:
    """Let go of those who have asked: they know by now."""
    with contextlib.suppress(BlockingIOError):
        while True:
            lock.accept()[0].close()


def lock_holder(port: int) -> Holder | None:
    """Return who holds the lock of ``port`` on this machine, ``None`` if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(_name(port))
        except BlockingIOError:
            return Holder()  # too many ask at once
        except OSError:
            return None
        form = struct.Struct("3i")  # struct ucred: pid, uid, gid of whoever began to listen
        pid, uid, _ = form.unpack(
            question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        )
        return Holder(pid, uid)


def _name(port: int) -> str:
    return f"\0rdzv-etcd-embedded-{port}"


class Answer(Enum):
    """What was found at an endpoint."""

    ETCD = "an etcd"
    NOTHING = "nothing listens there"
    SILENCE = "something accepts connections but does not answer"
    STRANGER = "something that is not etcd listens there"
    TLS = "something that speaks only https listens there"


@dataclass(frozen=True, slots=True)
class Found:
    answer: Answer
    detail: str = ""
    """For NOTHING: why there was no connection, in the system's words."""


def probe(endpoint: Endpoint, timeout_s: float) -> Found:
    """Return what is at ``endpoint``; blocks for at most about ``timeout_s``; never raises.

    A machine that cannot be resolved or reached counts as ``NOTHING``: it may come up yet. (Only
    the resolver keeps its own time.)
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = connect(endpoint.host, endpoint.port, deadline)
    except UnicodeError:
        return Found(Answer.NOTHING, f"{endpoint.host} is not a host name")
    except OSError as error:
        return Found(Answer.NOTHING, (error.strerror or str(error)).lower())
    with connection:
        try:
            reply = ask(connection, "GET", "/version", deadline=deadline)
        except OSError:
            return Found(Answer.SILENCE)  # an etcd that starts or ends does that
        except MalformedReplyError:
            return Found(Answer.STRANGER)
    return Found(_judge(reply.body))


def _judge(body: bytes) -> Answer:
    if b"HTTPS server" in body:  # what Go's TLS listener answers to plain http
        return Answer.TLS
    try:
        page = json.loads(body)
    except ValueError:
        return Answer.STRANGER
    known = isinstance(page, dict) and "etcdserver" in page
    return Answer.ETCD if known else Answer.STRANGER


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


_LARGEST = 1 << 22
"""No reply that is asked for here comes near it."""


class MalformedReplyError(Exception):
    """What came back is not HTTP."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Return a connection to the first address of ``host`` that accepts one; raises OSError."""
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left_s(deadline))
            connection.connect(address)
        except OSError as error:
            connection.close()
            refused = error
        else:
            return connection
    raise refused if refused is not None else OSError("it has no address")


def ask(
    connection: socket.socket,
    verb: str,
    path: str,
    body: str = "",
    token: str = "",
    *,
    deadline: float,
) -> Reply:
    """Send one request and return the whole reply, or raise at ``deadline`` (monotonic seconds).

    Raises :class:`OSError` if it is cut off or too late, :class:`MalformedReplyError` if what came
    is no HTTP. The connection is of no use afterwards.
    """
    content = body.encode()
    authorization = f"Authorization: {token}\r\n" if token else ""
    connection.settimeout(_left_s(deadline))
    connection.sendall(
        f"{verb} {path} HTTP/1.0\r\nHost: etcd\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    received = bytearray()
    while len(received) < _LARGEST and not _is_whole(received):
        connection.settimeout(_left_s(deadline))
        piece = connection.recv(65536)
        if not piece:
            break
        received += piece
        if not b"HTTP/".startswith(received[:5]):
            raise MalformedReplyError
    if not received:
        raise ConnectionResetError("it closed the connection without an answer")
    return _parse(bytes(received))


def _is_whole(received: bytearray) -> bool:
    """Tell whether the length that was announced is there; without one the end tells."""
    head, separator, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *([0-9]{1,9})", head)
    return bool(separator) and length is not None and len(body) >= int(length[1])


def _parse(text: bytes) -> Reply:
    head, separator, body = text.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] ([0-9]{3})\b", head)
    if status is None or not separator:
        raise MalformedReplyError
    return Reply(int(status[1]), body)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
