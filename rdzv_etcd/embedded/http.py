"""One HTTP request to an etcd, bounded as a whole. Knows sockets and HTTP/1.0; nothing of etcd.

``http.client`` bounds each read: a server that sends a byte a second keeps it for hours.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass

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
