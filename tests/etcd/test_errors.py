"""What etcd's and gRPC's error texts mean, one line each (texts as the servers send them)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv_etcd import errors
from rdzv_etcd.etcd.errors import Verdict, judge_text
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.port import Get
from tests.etcd.tools import LIMIT_S, PREFIX, client_of, put
from tests.support.servers import ENOUGH_TO_FILL, EtcdServer

pytestmark = pytest.mark.every_etcd

CODE = grpc.StatusCode
FAILED = "failed to connect to all addresses; last error: "
TIMED_OUT = "etcdserver: request timed out"


TEXTS = {
    (Verdict.UNKNOWN, errors.EtcdUnavailableError): [
        (CODE.UNAVAILABLE, "etcdserver: leader changed"),
        (CODE.UNAVAILABLE, f"{TIMED_OUT}, possibly due to previous leader failure"),
        (CODE.UNAVAILABLE, f"{TIMED_OUT}, waiting for the applied index took too long"),
        (CODE.INTERNAL, "Internal error from Core"),
        (CODE.UNAVAILABLE, "Socket closed"),
        (CODE.DEADLINE_EXCEEDED, ""),
    ],
    (Verdict.NOT_DONE, errors.EtcdUnavailableError): [
        (CODE.UNAVAILABLE, "etcdserver: no leader"),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: too many requests"),
        (CODE.UNAVAILABLE, FAILED + "UNKNOWN: ipv4:127.0.0.1:1: Connection refused"),
        (CODE.UNAVAILABLE, "DNS resolution failed for x:1"),
        (CODE.UNAVAILABLE, FAILED + "INTERNAL: ipv4:127.0.0.1:1: socket: Too many open files"),
    ],
    (Verdict.NOT_DONE, errors.EtcdTlsError): [
        (
            CODE.UNAVAILABLE,
            f"{FAILED}Ssl handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED",
        )
    ],
    (Verdict.STALE_TOKEN, errors.EtcdAuthError): [
        (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
    ],
    (Verdict.FINAL, errors.EtcdPermissionError): [
        (CODE.PERMISSION_DENIED, "etcdserver: permission denied")
    ],
    (Verdict.FINAL, errors.EtcdNoSpaceError): [
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
    ],
    (Verdict.FINAL, errors.RequestTooLargeError): [
        (CODE.INVALID_ARGUMENT, "etcdserver: request is too large")
    ],
    (Verdict.FINAL, errors.InvalidRequestError): [
        (CODE.INVALID_ARGUMENT, "etcdserver: too many operations in txn request"),
        (CODE.UNIMPLEMENTED, "unknown service"),
    ],
}


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [(code, text, meaning) for meaning, texts in TEXTS.items() for code, text in texts],
)
def test_a_text_is_judged(
    code: grpc.StatusCode, text: str, meaning: tuple[Verdict, type[Exception]]
) -> None:
    fault = judge_text(code, text, authenticated=True)
    assert (fault.verdict, type(fault.error)) == meaning


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("etcdserver: request timed out, waiting for the applied index took too long", "overload"),
        ("Internal error from Core", "while a message was being sent"),
    ],
)
def test_what_gives_no_hint_itself_gets_one(text: str, reason: str) -> None:
    assert reason in judge_text(CODE.UNAVAILABLE, text, authenticated=True).reason


async def test_a_full_database_has_an_error_of_its_own(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", "1000000"))
    async with client_of(server) as client:

        async def fill() -> None:
            for n in range(ENOUGH_TO_FILL):
                await client.txn(put(b"%d" % n, b"x" * 100_000), timeout_s=LIMIT_S)

        with pytest.raises(errors.EtcdNoSpaceError, match="operator"):
            await fill()
        assert (await client.get(Get(PREFIX + b"0"))).count == 1
