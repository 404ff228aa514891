"""Calls begun in their caller's thread: answered there, or handed to the loop with nothing lost."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import pytest

from rdzv_etcd import eager
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import (
    EtcdPermissionError,
    EtcdUnavailableError,
    LeaseNotFoundError,
    OutcomeUnknownError,
)
from rdzv_etcd.etcd import channels
from rdzv_etcd.etcd.api import Compare, Get, Put, Relation, Target, Txn
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.server import AioServer
from rdzv_etcd.group.runtime import Runtime
from rdzv_etcd.settings.model import Connection, Credentials, Endpoint, Tls
from tests.etcd.test_close import lender
from tests.etcd.tools import LIMIT_S, PREFIX, InOrder, connection, put
from tests.library.nodes import wait_until
from tests.support.certificates import Certificates
from tests.support.leaks import LeakCheck
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer
from tests.support.signals import handling

T = TypeVar("T")

KEY = PREFIX + b"here"
ANY = Get(KEY)


class Caller:
    """A client, and a thread that is not the loop's to call it from."""

    def __init__(self, runtime: Runtime, client: EtcdClient) -> None:
        self.runtime, self.client = runtime, client

    def call(self, coro: Coroutine[Any, Any, T]) -> T:
        return self.runtime.run_from_here(coro, LIMIT_S)

    def is_answered_here(self, coro: Coroutine[Any, Any, object]) -> bool:
        """Do it; tell whether the loop was not needed."""
        ended = eager.begin(coro)
        if ended is None:
            self.runtime.run(coro, LIMIT_S)
        return ended is not None


@contextmanager
def calling(where: Connection | Any, worth_calls: int = 0) -> Iterator[Caller]:
    """Calls are made in their own thread from the first on, unless ``worth_calls`` says later."""
    with Runtime.acquire() as runtime:
        client = (
            EtcdClient(where, InOrder(), worth_calls=worth_calls)
            if isinstance(where, Connection)
            else EtcdClient.from_etcd3(where)
        )
        yield Caller(runtime, client)
        runtime.run(client.close())


@pytest.fixture
def patient_etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """One with users, whose tokens outlive every test."""
    server = fresh_etcd()
    server.enable_auth()
    return server


def at(*ports: int) -> Connection:
    return Connection(tuple(Endpoint("127.0.0.1", port) for port in ports))


def test_frequent_calls_are_answered_in_the_callers_thread(etcd_server: EtcdServer) -> None:
    """The first ones are not: they would not pay for another connection."""
    with calling(connection(etcd_server), channels.WORTH_CALLS) as caller:
        here = [caller.is_answered_here(caller.client.get(ANY)) for _ in range(20)]
        assert here == [False] * 8 + [True] * 12
        assert caller.is_answered_here(caller.client.txn(put(b"here", b"value"), repeatable=True))
        assert caller.call(caller.client.get(ANY)).kvs[0].value == b"value"


def test_rare_calls_need_no_connection_of_their_own(etcd_server: EtcdServer) -> None:
    clock = InOrder()
    moments = [n * 5.0 for n in range(20)]
    clock.now_s = lambda: moments.pop(0)  # type: ignore[method-assign]
    calls = channels.BlockingCalls(f"127.0.0.1:{etcd_server.port}", lambda: None, clock)
    assert not any(calls.worth_it() for _ in range(20))


def test_others_may_ask_at_any_moment() -> None:
    """Here, from the garbage collector, which is when threads change in the middle of a C call.

    By this one in some 500 exchanges of ranks among 32 threads lost a writer.
    """
    calls = channels.BlockingCalls("127.0.0.1:1", lambda: None, SystemClock(), worth_calls=100)
    failures: list[RuntimeError] = []
    collections: list[str] = []

    def ask() -> None:
        try:
            calls.worth_it()
        except RuntimeError as failure:
            failures.append(failure)

    def somebody_else(phase: str, _info: dict[str, int]) -> None:
        collections.append(phase)
        ask()

    thresholds = gc.get_threshold()
    gc.callbacks.append(somebody_else)
    gc.set_threshold(1)
    try:
        kept: list[list[int]] = []
        for _ in range(1_000):
            kept.append([])  # the collector counts what is made
            ask()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(somebody_else)
    assert not failures
    assert collections


def test_on_a_loop_nothing_blocks(etcd_server: EtcdServer) -> None:
    with calling(connection(etcd_server)) as caller:
        threads = []

        async def watching() -> None:
            for _ in range(3):
                await caller.client.get(ANY)
                threads.append((eager.here(), threading.current_thread().name))

        caller.runtime.run(watching())
        assert threads == [(False, "rdzv-etcd")] * 3


def test_many_threads_call_at_once(etcd_server: EtcdServer) -> None:
    """Each key is created by exactly one of the threads that try."""
    threads, keys = 8, 50
    with calling(connection(etcd_server)) as caller, ThreadPoolExecutor(threads) as pool:

        def create_all(_: int) -> int:
            created = 0
            for n in range(keys):
                key = PREFIX + b"thread%d" % n
                missing = Compare(key, Target.VERSION, Relation.EQUAL, 0)
                made = Txn((missing,), (Put(key, b""),))
                created += caller.call(caller.client.txn(made, repeatable=True)).succeeded
            return created

        assert sum(pool.map(create_all, range(threads))) == keys


def test_a_failure_is_told_as_on_the_loop(
    etcd_server: EtcdServer, patient_etcd: EtcdServer
) -> None:
    with calling(connection(etcd_server)) as caller:
        caller.call(caller.client.get(ANY))
        lost = Txn((), (Put(KEY, b"", 12345),))
        with pytest.raises(LeaseNotFoundError, match="3039"):
            caller.call(caller.client.txn(lost))
    credentials = Credentials(USER, USER_PASSWORD)
    with calling(connection(patient_etcd, credentials=credentials)) as caller:
        caller.call(caller.client.get(ANY))
        with pytest.raises(EtcdPermissionError):
            caller.call(caller.client.get(Get(b"/elsewhere")))
        assert caller.is_answered_here(caller.client.get(ANY))


def test_an_expired_token_is_renewed(patient_etcd: EtcdServer) -> None:
    credentials = Credentials(USER, USER_PASSWORD)
    with calling(connection(patient_etcd, credentials=credentials)) as caller:
        caller.call(caller.client.get(ANY))
        auth = caller.client._link._auth
        assert auth.current is not None
        auth._metadata = (*auth.current[:-1], ("token", "expired.1"))
        assert not caller.is_answered_here(caller.client.get(ANY))
        assert caller.is_answered_here(caller.client.get(ANY))


def test_tls_is_used_here_too(mtls_etcd: EtcdServer, certificates: Certificates) -> None:
    tls = Tls(certificates.ca, certificates.client_cert, certificates.client_key)
    with calling(connection(mtls_etcd, tls=tls)) as caller:
        caller.call(caller.client.get(ANY))
        assert caller.is_answered_here(caller.client.get(ANY))


def test_a_lent_client_is_used_at_once(etcd_server: EtcdServer) -> None:
    mine = lender(etcd_server)
    with calling(mine) as caller:
        assert caller.is_answered_here(caller.client.get(ANY))
    mine.put("/rdzv_etcd/t/lent", "1")  # it is still open
    mine.close()


@pytest.mark.parametrize("how", ["refusing", "silent"])
def test_a_dead_endpoint_is_left_for_the_next(etcd_server: EtcdServer, how: str) -> None:
    """A guarded write, too, if the dead endpoint cannot have got it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = listener.getsockname()[1] if how == "silent" else free_port()
        with calling(at(dead, etcd_server.port)) as caller:
            dying = caller.client._link._servers[0]
            assert caller.call(caller.client.get(ANY)).revision > 0
            assert caller.client._link._servers[caller.client._link._current] is not dying


def test_a_guarded_write_goes_by_the_loop(etcd_server: EtcdServer) -> None:
    """There a connection is made before it is sent; here it could not be told whether it was."""
    with calling(connection(etcd_server)) as caller:
        caller.call(caller.client.get(ANY))
        assert not caller.is_answered_here(caller.client.txn(put(b"here")))
        assert caller.is_answered_here(caller.client.txn(put(b"here"), repeatable=True))


def test_a_write_that_a_silent_server_may_have_got_is_in_doubt(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    server = fresh_etcd()
    with calling(connection(server)) as caller:
        caller.call(caller.client.get(ANY))
        server.pause()
        with pytest.raises(OutcomeUnknownError):
            caller.call(caller.client.txn(put(b"here"), timeout_s=1.0, repeatable=True))
        server.resume()
        assert caller.call(caller.client.get(ANY)).revision > 0


def test_a_server_that_comes_back_is_used_here_again(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    server = fresh_etcd()
    with calling(connection(server)) as caller:
        caller.call(caller.client.get(ANY))
        server.restart()
        caller.call(caller.client.txn(put(b"here"), repeatable=True))
        deadline = threading.Event()
        timer = threading.Timer(LIMIT_S, deadline.set)
        timer.start()
        while not caller.is_answered_here(caller.client.get(ANY)):
            assert not deadline.is_set(), "every call still goes to the loop"
        timer.cancel()
        timer.join()


def test_a_signal_interrupts_a_call_that_gets_no_answer(
    fresh_etcd: Callable[..., EtcdServer],
) -> None:
    """As torchrun's handlers do, on SIGTERM."""

    class Interruption(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interruption

    server = fresh_etcd()
    with calling(connection(server)) as caller:
        caller.call(caller.client.get(ANY))
        server.pause()
        with handling(signal.SIGALRM, interrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with pytest.raises(Interruption):
                    # Its own limit is the attempt's: 10 s, then the loop goes on for 20.
                    caller.call(caller.client.get(ANY, timeout_s=30.0))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                server.resume()
        assert caller.call(caller.client.get(ANY)).revision > 0


def test_closing_ends_a_call_that_gets_no_answer(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd()
    with calling(connection(server)) as caller:
        caller.call(caller.client.get(ANY))
        server.pause()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: caller.call(caller.client.get(ANY)))
            (endpoint,) = caller.client._link._servers
            assert isinstance(endpoint, AioServer)
            wait_until("a thread blocks", lambda: endpoint._here._busy)
            caller.runtime.run(caller.client.close())
            with pytest.raises(EtcdUnavailableError, match="closed"):
                waiting.result(LIMIT_S)
        with pytest.raises(EtcdUnavailableError, match="closed"):
            caller.call(caller.client.get(ANY))
        server.resume()


def test_it_leaves_nothing_and_starts_no_thread(etcd_server: EtcdServer) -> None:
    def use() -> None:
        with calling(connection(etcd_server)) as caller:
            caller.call(caller.client.get(ANY))
            threads = threading.active_count()
            assert caller.is_answered_here(caller.client.get(ANY))
            assert threading.active_count() == threads
            # The connection is given up, as when it does not answer; the next call makes another.
            caller.runtime.run(caller.client._link._servers[0].renew())
            assert caller.is_answered_here(caller.client.get(ANY))

    use()  # what gRPC starts once per process is there now
    check = LeakCheck()
    for _ in range(3):
        use()
    check.check()
