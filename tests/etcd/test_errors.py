"""What etcd's and gRPC's error texts mean, one line each (texts as the servers send them)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv_etcd import errors
from rdzv_etcd.etcd.errors import Verdict, judge_text
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.port import Get
from tests.etcd.tools import LIMIT_S, PREFIX, client_of, put, run
from tests.support.servers import ENOUGH_TO_FILL, EtcdServer

CODE = grpc.StatusCode
FAILED = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("code", "text", "verdict", "error"),
    [
        (CODE.UNAVAILABLE, "etcdserver: no leader", Verdict.REFUSED, errors.EtcdUnavailableError),
        (
            CODE.RESOURCE_EXHAUSTED,
            "etcdserver: too many requests",
            Verdict.REFUSED,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            "etcdserver: leader changed",
            Verdict.UNKNOWN,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            "etcdserver: request timed out, possibly due to previous leader failure",
            Verdict.UNKNOWN,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            "etcdserver: request timed out, waiting for the applied index took too long",
            Verdict.UNKNOWN,
            errors.EtcdUnavailableError,
        ),
        (CODE.INTERNAL, "Internal error from Core", Verdict.UNKNOWN, errors.EtcdUnavailableError),
        (CODE.UNAVAILABLE, "Socket closed", Verdict.UNKNOWN, errors.EtcdUnavailableError),
        (CODE.DEADLINE_EXCEEDED, "", Verdict.UNKNOWN, errors.EtcdUnavailableError),
        (
            CODE.UNAVAILABLE,
            FAILED + "UNKNOWN: ipv4:127.0.0.1:1: Connection refused",
            Verdict.NOT_SENT,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            "DNS resolution failed for x:1",
            Verdict.NOT_SENT,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            FAILED + "INTERNAL: ipv4:127.0.0.1:1: socket: Too many open files",
            Verdict.NOT_SENT,
            errors.EtcdUnavailableError,
        ),
        (
            CODE.UNAVAILABLE,
            FAILED + "Ssl handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED",
            Verdict.NOT_SENT,
            errors.EtcdTlsError,
        ),
        (
            CODE.UNAUTHENTICATED,
            "etcdserver: invalid auth token",
            Verdict.STALE_TOKEN,
            errors.EtcdAuthError,
        ),
        (
            CODE.INVALID_ARGUMENT,
            "etcdserver: revision of auth store is old",
            Verdict.STALE_TOKEN,
            errors.EtcdAuthError,
        ),
        (
            CODE.PERMISSION_DENIED,
            "etcdserver: permission denied",
            Verdict.FINAL,
            errors.EtcdPermissionError,
        ),
        (
            CODE.RESOURCE_EXHAUSTED,
            "etcdserver: mvcc: database space exceeded",
            Verdict.FINAL,
            errors.EtcdNoSpaceError,
        ),
        (
            CODE.INVALID_ARGUMENT,
            "etcdserver: request is too large",
            Verdict.FINAL,
            errors.RequestTooLargeError,
        ),
        (
            CODE.INVALID_ARGUMENT,
            "etcdserver: too many operations in txn request",
            Verdict.FINAL,
            errors.InvalidRequestError,
        ),
        (CODE.UNIMPLEMENTED, "unknown service", Verdict.FINAL, errors.InvalidRequestError),
    ],
)
def test_a_text_is_judged(
    code: grpc.StatusCode, text: str, verdict: Verdict, error: type[Exception]
) -> None:
    fault = judge_text(code, text, authenticated=True)
    assert (fault.verdict, type(fault.error)) == (verdict, error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("etcdserver: request timed out, waiting for the applied index took too long", "overload"),
        ("Internal error from Core", "while a message was being sent"),
    ],
)
def test_what_gives_no_hint_itself_gets_one(text: str, reason: str) -> None:
    assert reason in judge_text(CODE.UNAVAILABLE, text, authenticated=True).reason


def test_a_full_database_is_told_apart(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", "1000000"))

    async def scenario() -> None:
        async with client_of(server) as client:

            async def fill() -> None:
                for n in range(ENOUGH_TO_FILL):
                    await client.txn(put(b"%d" % n, b"x" * 100_000), timeout_s=LIMIT_S)

            with pytest.raises(errors.EtcdNoSpaceError, match="operator"):
                await fill()
            assert (await client.get(Get(PREFIX + b"0"))).count == 1

    run(scenario())
