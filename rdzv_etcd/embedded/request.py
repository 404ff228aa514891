"""One request on a connected socket, in HTTP or a line, within one limit for the whole of it.

``http.client`` and files limit each read: a server that sends a byte an hour would keep its caller
forever. Standard library only.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

_LARGEST = 1 << 22
"""Bytes; no reply that is asked for here comes near it."""
_PROTOCOL = b"HTTP/1."


def ask_line(sock: socket.socket, question: object, limit_s: float) -> Any:
    """Send a line of JSON; return what the line that answers it holds. Closes the socket.

    Raises :class:`OSError` if there is no answer or it is not complete within ``limit_s``, and
    :class:`ValueError` if it is not such a line.
    """
    line = b""
    with sock:
        for line in _received(sock, json.dumps(question).encode() + b"\n", limit_s):
            if line.endswith(b"\n"):
                break
            if len(line) > _LARGEST:
                raise ValueError("too long")
    return parsed(line)


def parsed(text: bytes | str) -> Any:
    """Return what JSON of another process holds; raises ValueError, whatever it is."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def ask(sock: socket.socket, path: str, limit_s: float, body: object = None) -> tuple[int, bytes]:
    """Send a GET, or a POST of ``body`` as JSON; return the reply's status and content.

    Closes the socket. Raises :class:`OSError` if there is no reply or it is not complete within
    ``limit_s``, and :class:`ValueError` if it is not HTTP.
    """
    reply = b""
    with sock:
        for reply in _received(sock, written(path, body), limit_s):
            if not reply.startswith(_PROTOCOL[: len(reply)]) or len(reply) > _LARGEST:
                break
    return read(reply)


def _received(sock: socket.socket, request: bytes, limit_s: float) -> Iterator[bytes]:
    """Send a request; yield all that has come in reply, whenever there is more, until the other
    side has sent all or the caller stops. Raises OSError."""
    until_s = time.monotonic() + limit_s
    reply = b""
    sock.settimeout(limit_s)
    sock.sendall(request)
    while piece := sock.recv(1 << 16):
        reply += piece
        yield reply
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)


def written(path: str, body: object = None) -> bytes:
    """Return what to send."""
    content = b"" if body is None else json.dumps(body).encode()
    # With HTTP 1.0 the reply is not cut into chunks, and ends with the connection.
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.0", "Host: etcd"]
    lines += [f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


def read(reply: bytes) -> tuple[int, bytes]:
    """Return the status and content of a whole reply; raises as :func:`ask`."""
    if not reply:
        raise ConnectionResetError("closed without a reply")
    head, _, content = reply.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    if status is None:
        raise ValueError("not HTTP")
    return int(status[1]), content
