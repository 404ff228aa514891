"""Finds out by TCP, TLS and plain HTTP what is wrong with an endpoint that cannot be reached.

gRPC does not distinguish these, and words what it reports differently in each version. Knows
sockets; must not know gRPC or what etcd is used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from rdzv_etcd.clock import wait_for
from rdzv_etcd.errors import EtcdTlsError, EtcdUnavailableError
from rdzv_etcd.process import begun_in_thread
from rdzv_etcd.settings.connection import Connection, Endpoint
from rdzv_etcd.settings.hosts import wait_for_name
from rdzv_etcd.text import LINE, shown
from rdzv_etcd.trust import (
    GIVE_ALL,
    NO_TLS,
    connected,
    speaks_tls,
    why_refused,
)

_log = logging.getLogger(__name__)  # of its own: the command line shows only this one's lines

LOOK_AFTER_S = 2.0
"""A healthy etcd has answered before that."""
_STEP_S = 1.5
"""How long one probe may take: of TCP, TLS or HTTP."""
_REQUEST = b"GET /version HTTP/1.0\r\nHost: etcd\r\n\r\n"
_AFTER_FAILURE_S = 1.0
"""How long an error may be delayed to be explained."""
_NO_HTTPS = "speaks http, not https: use http:// in the endpoint (or protocol=http)"
_NO_HTTP = (
    "speaks https, not http: use https:// in the endpoint (or protocol=https); if it is an "
    f"embedded etcd with a secret, {GIVE_ALL}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong at one endpoint."""

    endpoint: str
    text: str
    lasts: bool = False
    """Whether it does not pass by itself: a wrong scheme, or another secret."""


@asynccontextmanager
async def first_contact(connection: Connection | None) -> AsyncIterator[None]:
    """Log what is wrong if the block, which needs etcd, takes more than two seconds; if it fails
    because of a wrong scheme or secret, name that in the error.

    ``None``: etcd is reached in another way.
    """
    if connection is None:
        yield
        return
    failed = asyncio.Event()
    looking = asyncio.ensure_future(_look_soon(connection, failed))
    try:
        yield
    except (EtcdUnavailableError, EtcdTlsError) as error:
        failed.set()
        done, _ = await asyncio.wait({looking}, timeout=_AFTER_FAILURE_S)
        wrong = [problem for problem in looking.result() if problem.lasts] if done else []
        if not wrong:
            raise
        explained = error.copy()
        rest = f" ({error})" if len(wrong) < len(connection.endpoints) else ""
        explained.args = (shown(_joined(wrong) + rest, LINE),)
        raise explained.with_traceback(None) from None
    finally:
        looking.cancel()
        await asyncio.wait({looking})


async def _look_soon(connection: Connection, failed: asyncio.Event) -> list[Problem]:
    with contextlib.suppress(TimeoutError):
        await wait_for(failed.wait(), LOOK_AFTER_S)
    problems = await look(connection)
    if problems and not failed.is_set():
        _log.warning(
            "no contact with etcd for %g s, of %g: %s",
            LOOK_AFTER_S,
            connection.connect_timeout_s,
            shown(_joined(problems), LINE),
        )
    return problems


def _joined(problems: Sequence[Problem]) -> str:
    """Say each thing once, with the endpoints at which it is wrong."""
    where: dict[str, list[str]] = {}
    for it in problems:
        where.setdefault(f" {it.text}" if it.lasts else f": {it.text}", []).append(it.endpoint)
    return "; ".join(f"{', '.join(endpoints)}{text}" for text, endpoints in where.items())


def wait_for_names(connection: Connection, patience_s: float) -> None:
    """Block until the name of an endpoint can be resolved, for at most ``patience_s``.

    That of a pod may not be in DNS yet. If none can be, the first contact will report it.
    """
    hosts = [endpoint.host for endpoint in connection.endpoints]

    def report(waited_s: float, problem: str) -> None:
        _log.warning(
            "waiting %d s (of %g) until this host can resolve a name in --rdzv-endpoint, %s: %s",
            waited_s,
            patience_s,
            shown(", ".join(hosts)),
            problem,
        )

    with contextlib.suppress(OSError, UnicodeError):
        wait_for_name(hosts, patience_s, report)


async def look(connection: Connection) -> list[Problem]:
    """Return what is wrong at each endpoint, as far as that shows within some seconds."""
    looks: list[asyncio.Future[Problem | None]] = []
    try:
        for endpoint in connection.endpoints:
            work = partial(_problem, endpoint, connection)
            looks.append(asyncio.wrap_future(begun_in_thread(work, "rdzv-etcd first contact")))
        done, _ = await asyncio.wait(looks, timeout=3 * _STEP_S)  # a resolver may take longer
    except RuntimeError:  # no more threads
        return []
    finally:
        for each in looks:
            each.cancel()
    found = [each.result() for each in looks if each in done]
    return [problem for problem in found if problem is not None]


def _problem(endpoint: Endpoint, connection: Connection) -> Problem | None:
    where = endpoint.target
    try:
        if connection.tls is None:
            if not _speaks_http(endpoint) and _speaks_tls(endpoint):
                return Problem(where, _NO_HTTP, lasts=True)
        elif connection.secret is not None and (why := _why_refused(endpoint, connection.secret)):
            return Problem(where, f"cannot be used: {why}", lasts=True)
        elif not _speaks_tls(endpoint) and _speaks_http(endpoint):
            why = _NO_HTTPS if connection.secret is None else f"cannot be used: {NO_TLS}"
            return Problem(where, why, lasts=True)
    except (OSError, UnicodeError) as error:
        return Problem(where, _why(error))
    return None


def _why_refused(endpoint: Endpoint, secret: str) -> str:
    """Return why the two ends do not trust each other, as far as a handshake shows it."""
    try:
        with connected(endpoint.host, endpoint.port, _STEP_S, secret) as connection:
            connection.sendall(_REQUEST)
            connection.recv(1)  # only after its part of the handshake a server judges ours
    except OSError as error:
        return why_refused(error)
    return ""


def _why(error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return "the host name cannot be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused - is etcd running there?"
    if isinstance(error, TimeoutError):
        return "no answer - is there a firewall in between?"
    return (error.strerror or str(error)).lower()  # such as: no route to host


def _speaks_tls(endpoint: Endpoint) -> bool:
    return speaks_tls(endpoint.host, endpoint.port, _STEP_S)


def _speaks_http(endpoint: Endpoint) -> bool:
    """Return whether a request in plain HTTP gets an answer in HTTP, other than the refusal of Go's
    TLS servers.

    Raises OSError if there is no connection.
    """
    received, until_s = b"", time.monotonic() + _STEP_S
    with (
        connected(endpoint.host, endpoint.port, _STEP_S) as plain,
        contextlib.suppress(OSError),
    ):
        plain.sendall(_REQUEST)
        # Some servers send their refusal in several pieces, and then close.
        while (left_s := until_s - time.monotonic()) > 0:
            plain.settimeout(left_s)
            piece = plain.recv(4096)
            received += piece
            if not piece:
                break
    return received.startswith(b"HTTP/") and b"HTTPS server" not in received
