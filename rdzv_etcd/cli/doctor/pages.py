"""What one etcd tells over plain HTTP on its client port, to whoever may connect.

Knows etcd's pages; asks gently, and takes no answer for "it does not tell". Blocks.

Sources: ``/version``, ``/health``, ``/metrics`` and ``/debug/vars`` of etcd 3.4 to 3.6.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time

from rdzv_etcd.cli.doctor.facts import Pages
from rdzv_etcd.embedded.http import MalformedReplyError, ask, connect
from rdzv_etcd.settings import Endpoint, Tls

_QUOTA = "etcd_server_quota_backend_bytes"
_SIZE = "etcd_mvcc_db_total_size_in_bytes"
_PING_FLAG = "grpc-keepalive-min-time"
_NO_REASON = "it gives no reason, as etcd 3.4 does with the alarm NOSPACE"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_pages(endpoint: Endpoint, tls: Tls | None, timeout_s: float) -> Pages:
    """Ask for them, each for at most ``timeout_s``; never raises because one is not there."""
    pages = {path: _page(endpoint, tls, path, timeout_s) for path in _PATHS}
    health = _json(pages["/health"])
    is_sick = str(health.get("health", "true")).lower() != "true"
    version = _json(pages["/version"]).get("etcdserver")
    return Pages(
        version if isinstance(version, str) else None,
        str(health.get("reason") or _NO_REASON) if is_sick else None,
        _metric(pages["/metrics"], _SIZE),
        _metric(pages["/metrics"], _QUOTA),
        _ping_limit_s(_json(pages["/debug/vars"]).get("cmdline")),
    )


_PATHS = ("/version", "/health", "/metrics", "/debug/vars")


def _page(endpoint: Endpoint, tls: Tls | None, path: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(endpoint, tls, deadline) as connection:
            reply = ask(connection, "GET", path, deadline=deadline)
    except (OSError, ValueError, MalformedReplyError):  # a certificate's problem is an OSError
        return ""
    return reply.body.decode(errors="replace")  # /health is 503 when something is wrong


def _connect(endpoint: Endpoint, tls: Tls | None, deadline: float) -> socket.socket:
    connection = connect(endpoint.host, endpoint.port, deadline)
    if tls is None:
        return connection
    try:
        return _context(tls).wrap_socket(connection, server_hostname=endpoint.host)
    except BaseException:
        connection.close()
        raise


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca_cert is None else str(tls.ca_cert))
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _json(text: str) -> dict[str, object]:
    try:
        page = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return page if isinstance(page, dict) else {}


def _metric(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
    try:
        return None if found is None else int(float(found[1]))
    except (ValueError, OverflowError):
        return None


def _ping_limit_s(command: object) -> float | None:
    """Read the flag from etcd's command line; one that was set otherwise is not seen."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name, equals, inline = flag.lstrip("-").partition("=")
        if flag.startswith("-") and name == _PING_FLAG:
            return _seconds(inline if equals else value)
    return None


def _seconds(text: str) -> float | None:
    """Read a duration as Go writes it, such as ``1m30s``."""
    if not re.fullmatch(r"(?:\d+(?:\.\d+)?(?:ms|h|m|s))+", text):
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
