"""Judges failures of gRPC and etcd: what they mean for a retry, and which error they become.

Knows etcd's error texts and gRPC's. Must not know which call failed, nor retry anything.

Sources: etcd's api/v3rpc/rpctypes/error.go (3.4 to 3.6), and gRPC's status texts as seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.errors import (
    CompactedError,
    EtcdAuthError,
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdTlsError,
    EtcdUnavailableError,
    InvalidRequestError,
    LeaseExistsError,
    LeaseNotFoundError,
    RequestTooLargeError,
)
from rdzv_etcd.etcd.grpc_start import grpc


class Verdict(Enum):
    """What a failure of one attempt means for the next one."""

    NOT_DONE = "it did not reach a server, or that did not do it; another or a later one may"
    UNKNOWN = "the server may or may not have done it"
    STALE_TOKEN = "not done; authenticate again first"
    FINAL = "not done, and trying again will not help"


@dataclass(frozen=True, slots=True)
class Fault:
    """One judged failure."""

    verdict: Verdict
    reason: str
    """Short, for messages: what happened and its likely cause."""
    error: EtcdError
    """What to raise if there is no other attempt (and nothing was applied)."""
    is_timeout: bool = False
    """Whether there was no answer in time."""

    @property
    def is_tls(self) -> bool:
        return isinstance(self.error, EtcdTlsError)


class AttemptError(Exception):
    """One attempt at one endpoint failed. Never leaves this package."""

    def __init__(self, fault: Fault, endpoint: str) -> None:
        super().__init__(f"{endpoint}: {fault.reason}")
        self.fault = fault
        self.endpoint = endpoint


_TOKEN = re.compile(
    "invalid auth token|user name is empty|revision of auth store is old|revision in header is old"
)
_REFUSED = re.compile(
    "no leader|too many requests|not capable|rpc not supported for learner|raft proposal dropped"
)
_NOT_CONNECTED = re.compile(
    "failed to connect to all addresses|DNS resolution failed|Name resolution failure|"
    "errors resolving|empty address list",
    re.IGNORECASE,
)
_TLS = re.compile(
    "handshake failed|SSL_ERROR|not in peer certificate|Hostname Verification|certificate|"
    "TSI_DATA_CORRUPTED",
    re.IGNORECASE,
)
_TOO_LARGE = re.compile("request is too large|message larger than max")

_OTHER_HOST = (
    "the server's certificate is for another host name - use one that it names in the endpoint"
)
_TLS_HINTS = (
    ("certificate has expired", "the server's certificate has expired (or a clock is wrong)"),
    ("certificate is not yet valid", "the server's certificate is not valid yet, by this clock"),
    ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed - check ca_cert"),
    ("not in peer certificate", _OTHER_HOST),
    ("Hostname Verification", _OTHER_HOST),
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS - use http://"),
    ("CERTIFICATE_REQUIRED", "the server requires a client certificate - set cert and key"),
    # Servers built with Go before 1.20 send this whatever is wrong with it, or if there is none.
    (
        "BAD_CERTIFICATE",
        "the server refused the client certificate: none is given, it has expired, or its CA is "
        "not trusted there - check cert and key",
    ),
    ("UNKNOWN_CA", "the server does not trust the client certificate's CA - check cert"),
    ("UNKNOWN_CERTIFICATE", "the server refused the client certificate - check cert and key"),
    ("CERTIFICATE_EXPIRED", "the client certificate has expired - renew cert"),
    # An alert that comes after the client has finished its side of a TLS 1.3 handshake.
    (
        "TSI_DATA_CORRUPTED",
        "refused after the handshake - does it require a client certificate, or has the one given "
        "expired, or is its CA not trusted there?",
    ),
)
_CONNECT_HINTS = (
    # Not counted as TLS: a server or balancer that is going down does the same.
    (
        "Handshake read failed",
        "it aborts the handshake, or does not answer it - does it hang, does it speak https://, "
        "and require a client certificate?",
    ),
    ("Too many open files", "too many open files in this process - raise ulimit -n"),
    ("Connection refused", "connection refused - is etcd running there?"),
    ("No route to host", "no route to host"),
    ("Network is unreachable", "network unreachable"),
    ("Failed parsing HTTP/2", "it answers, but is not etcd (no gRPC) - is the port right?"),
    ("before receiving SETTINGS", "it accepts connections but does not answer"),
    ("onnection reset", "connection reset - does it need https://?"),
    ("Socket closed", "it closes the connection - does it need https://?"),
    ("DNS", "the host name cannot be resolved"),
    ("resol", "the host name cannot be resolved"),
    ("imed out", "connection timed out"),
)
LAGGING = "applied index took too long"
"""etcd (seen: 3.5.30, not 3.5.1) refuses a renewal with this, and ends its stream, while it is more
than a second behind with applying what is committed."""
SENDING = "Internal error from Core"
"""All that gRPC reports of a stream's end if a message was being sent at that moment."""
_UNKNOWN_HINTS = (
    (LAGGING, "etcd is overloaded: it lags behind what it has committed"),
    (SENDING, "the stream ended while a message was being sent"),
)


def judge(error: grpc.RpcError, *, authenticated: bool) -> Fault:
    """Judge a failed call; ``authenticated``: whether there are credentials to renew."""
    return judge_text(error.code(), error.details() or "", authenticated=authenticated)


def judge_text(code: grpc.StatusCode | None, text: str, *, authenticated: bool) -> Fault:
    """Judge a status; ``code`` is ``None`` where etcd gives only a text (cancelled watches)."""
    if _TOKEN.search(text):
        error = EtcdAuthError(_auth_message(text, authenticated))
        return Fault(Verdict.STALE_TOKEN if authenticated else Verdict.FINAL, str(error), error)
    final = _final(code, text)
    if final is not None:
        return Fault(Verdict.FINAL, str(final), final)
    if _REFUSED.search(text):
        return unavailable(Verdict.NOT_DONE, text)
    if _NOT_CONNECTED.search(text):
        return _not_connected(text)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return replace(unavailable(Verdict.UNKNOWN, "no answer in time"), is_timeout=True)
    return unavailable(Verdict.UNKNOWN, _unknown_reason(code, text))


def final_error(failed: AttemptError, user: str | None) -> EtcdError:
    """Return what to raise for a final failure: with the endpoint and the user, if they matter."""
    error = failed.fault.error
    if isinstance(error, EtcdPermissionError | EtcdAuthError):
        as_user = "" if user is None else f", as user {user!r}"  # or the client certificate's
        return type(error)(f"{failed.endpoint}{as_user}: {error}")
    if isinstance(error, InvalidRequestError):
        return InvalidRequestError(f"{failed.endpoint}: {error}")
    return error


def unavailable(verdict: Verdict, reason: str) -> Fault:
    """Return a fault without a better error than "unavailable"."""
    return Fault(verdict, reason, EtcdUnavailableError(reason))


def _auth_message(text: str, authenticated: bool) -> str:
    if authenticated:
        return f"etcd refuses the token it has just issued: {text}"
    return f"etcd requires authentication, but no user and password are configured ({text})"


def _final(code: grpc.StatusCode | None, text: str) -> EtcdError | None:  # noqa: PLR0911 - a table
    if "authentication failed" in text or "user name not found" in text:
        return EtcdAuthError(f"etcd refused the user name or password ({text})")
    if "permission denied" in text:
        return EtcdPermissionError(f"the etcd user may not do this ({text})")
    if "database space exceeded" in text or "alarm:NOSPACE" in text:
        return EtcdNoSpaceError(text)
    if "requested lease not found" in text:
        return LeaseNotFoundError(0)
    if "lease already exists" in text:
        return LeaseExistsError(0)
    if _TOO_LARGE.search(text):
        return RequestTooLargeError(f"the request is larger than this etcd accepts ({text})")
    if "required revision has been compacted" in text:
        return CompactedError(0)
    if code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
    ):
        return InvalidRequestError(f"etcd refused the request: {text}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequestError(
            f"this server does not offer etcd's v3 API - is the port right? ({text})"
        )
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return EtcdPermissionError(f"access refused ({text})")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return EtcdAuthError(f"authentication refused ({text})")
    return None


def _not_connected(text: str) -> Fault:
    last = _shorten(text)
    if _TLS.search(text):
        hint = _hint(_TLS_HINTS, text) or f"TLS failed: {last}"
        return Fault(Verdict.NOT_DONE, hint, EtcdTlsError(f"TLS handshake failed: {hint}"))
    return unavailable(Verdict.NOT_DONE, _hint(_CONNECT_HINTS, text) or last)


def _unknown_reason(code: grpc.StatusCode | None, text: str) -> str:
    status = code.name if code is not None else "no status"
    return _hint(_UNKNOWN_HINTS, text) or _shorten(text) or f"failed with {status}"


def _hint(hints: Sequence[tuple[str, str]], text: str) -> str | None:
    """Return the first hint whose mark is in the text."""
    return next((hint for mark, hint in hints if mark in text), None)


def _shorten(text: str) -> str:
    """Keep the part of gRPC's text that names the cause."""
    words = " ".join(text.rpartition("last error: ")[2].split())[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
