"""Links over TCP: who answers, how a link ends, and what strangers can do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil
import pytest

from rdzv_etcd.arguments import LONGEST_S
from rdzv_etcd.peers import Answer, Contact, LinkEnd, Peer, PeerLink, tcp
from rdzv_etcd.peers.tcp import TcpPeers
from tests.support.netns import Host, Network
from tests.support.scenarios import Scenario, as_test

HERE = "127.0.0.1"
LIMIT_S = 30.0
JOB = "/p/job"
A, B = Peer(JOB, "a~1~x"), Peer(JOB, "b~2~x")
RUBBISH = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
    b"rdzv-etcd peer 1 \n",
    b"rdzv-etcd peer 1 [1,2]\n",
    b'rdzv-etcd peer 2 ["/p/job","b~2~x"]\n',
    b"rdzv-etcd peer 1 " + b"[" * 8000 + b"\n",
    b"x" * 100_000,
]


def in_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run it, and check that it leaves no descriptor behind."""
    gc.collect()  # what earlier tests left
    before = psutil.Process().num_fds()
    asyncio.run(asyncio.wait_for(work, LIMIT_S))
    assert psutil.Process().num_fds() <= before  # gRPC closes those of earlier tests when it likes


awaited = as_test(lambda scenario: in_loop(scenario()))


@asynccontextmanager
async def node(me: Peer | None = B, address: str = HERE) -> AsyncIterator[TcpPeers]:
    """A node that answers for ``me``, or has not begun to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    peers = TcpPeers(silence_s=1.0)
    peers.listen_on(socket.create_server((address, 0), family=family))
    try:
        if me is not None:
            await peers.admit(me)
        yield peers
    finally:
        await peers.close()
        await peers.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def plain_server(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> AsyncIterator[int]:
    writers: list[asyncio.StreamWriter] = []

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await serve(reader, writer)

    server = await asyncio.start_server(begin, HERE, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def _with_two(scenario: Scenario) -> None:
    async with node() as b, node(A) as a:
        await scenario(a, b)


paired = as_test(lambda scenario: in_loop(_with_two(scenario)), given=2)
"""Make a scenario with nodes A and B a test."""


async def reached(peers: TcpPeers, port: int, peer: Peer = B, limit_s: float = LIMIT_S) -> Contact:
    return await peers.connect(HERE, port, peer, limit_s)


async def link_to(peers: TcpPeers, port: int) -> PeerLink:
    contact = await reached(peers, port)
    assert contact.answer is Answer.SAME
    assert contact.link is not None
    return contact.link


async def until_refused(peers: TcpPeers, port: int) -> None:
    """A process that is dying answers for some milliseconds."""
    async for contact in tries(peers, port):
        if contact.answer is Answer.REFUSED:
            return


async def tries(peers: TcpPeers, port: int) -> AsyncIterator[Contact]:
    while True:
        yield await reached(peers, port)


async def until(holds: Callable[[], bool]) -> None:
    """For what the kernel has yet to do."""
    while not holds():  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0.01)


@contextmanager
def other_process(*more: str, address: str = HERE, host: Host | None = None) -> Iterator[Any]:
    """Node B in a process of its own; its port."""
    command = [sys.executable, "-m", "tests.peers.other_node", address, JOB, B.node_id, *more]
    if host is not None:
        command = host.enter(command)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- who answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [HERE, "::1", "localhost"])
def test_the_node_itself_answers(address: str) -> None:
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6")

    async def work() -> None:
        async with node(address=HERE if address == "localhost" else address) as b, node(A) as a:
            contact = await a.connect(address, b.port, B, LIMIT_S)
            assert contact.answer is Answer.SAME
            assert contact.link is not None
            assert asyncio.get_running_loop()._default_executor is None  # type: ignore[attr-defined]

    in_loop(work())


@pytest.mark.parametrize("asked", [Peer(JOB, "c~3~x"), Peer("/p/other", B.node_id)])
@paired
async def test_another_node_answers_that_it_is_another(
    a: TcpPeers, b: TcpPeers, asked: Peer
) -> None:
    contact = await reached(a, b.port, asked)
    assert contact.answer is Answer.OTHER
    assert contact.link is None


@awaited
async def test_a_host_refuses_where_nobody_listens() -> None:
    async with node(A) as a:
        with socket.create_server((HERE, 0)) as gone:
            port = gone.getsockname()[1]
        contact = await reached(a, port)
        assert contact.answer is Answer.REFUSED


@awaited
async def test_a_host_that_cannot_be_reached() -> None:
    async with node(A) as a:
        # A listener whose queue is full answers nothing, as a host that is gone.
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.create_server((HERE, 0), backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(full.getsockname())
            contact = await reached(a, full.getsockname()[1], limit_s=0.3)
        assert contact == Contact(Answer.UNREACHABLE, "timed out")


@awaited
async def test_a_name_that_nobody_knows() -> None:
    async with node(A) as a:
        contact = await a.connect("nobody.invalid", 1, B, LIMIT_S)
        assert contact.answer is Answer.UNREACHABLE
        assert "cannot be resolved" in contact.why


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize("first", ["::1", HERE])
@paired
async def test_a_name_of_several_addresses(
    a: TcpPeers, b: TcpPeers, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As localhost has: the node listens at one of them, whichever comes first."""
    asked: list[str] = []

    def look_up(host: str, port: int, *, flags: int = 0, **_: object) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror("a name")
        asked.append(host)
        families = {"::1": socket.AF_INET6, HERE: socket.AF_INET}
        places = [(family, 0, 0, "", (at, port)) for at, family in families.items()]
        return places if first == "::1" else places[::-1]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for _ in range(3):  # a link that has ended is tried again every millisecond
        assert (await a.connect("b", b.port, B, LIMIT_S)).answer is Answer.SAME
    port = b.port
    await b.close()
    assert (await a.connect("b", port, B, LIMIT_S)).answer is Answer.REFUSED
    assert asked == ["b"]


@pytest.mark.parametrize("silence_s", [0.0, 0.001, 3.0, 864_000.0, LONGEST_S])
@awaited
async def test_any_time_of_silence_that_may_be_set(silence_s: float) -> None:
    async with node() as b:
        a = TcpPeers(silence_s)
        assert (await reached(a, b.port)).answer is Answer.SAME
        await a.close()


@awaited
async def test_an_attempt_that_is_cancelled_leaves_no_connection() -> None:
    async with node(me=None) as b, node(A) as a:
        trying = asyncio.ensure_future(reached(a, b.port))
        await until(lambda: any(watched.is_connected for watched in a._links))
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying
        await b.admit(B)
        assert (await reached(a, b.port)).answer is Answer.SAME
        await until(lambda: len(b.watchers) == 1)


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readline())
    await asyncio.Event().wait()


async def _talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 1000)
        await writer.drain()


@pytest.mark.parametrize(
    ("serve", "answer"),
    [
        (_silent, Answer.HELD),
        (_closes, Answer.MUTE),
        (_echoes, Answer.MUTE),
        (_talks, Answer.MUTE),
    ],
)
@awaited
async def test_anything_else_that_accepts_is_no_node(serve: Any, answer: Answer) -> None:
    async with plain_server(serve) as port, node(A) as a:
        contact = await reached(a, port, limit_s=1.0)
        assert contact.answer is answer
        assert contact.link is None


@awaited
async def test_a_contact_before_a_node_answers_waits_for_it() -> None:
    async with node(me=None) as b, node(A) as a:
        early = asyncio.ensure_future(reached(a, b.port))
        assert (await reached(a, b.port, limit_s=0.2)).answer is Answer.HELD
        assert not early.done()
        await b.admit(B)
        assert (await early).answer is Answer.SAME


@awaited
async def test_a_node_that_has_ended_before_it_answered() -> None:
    async with node(me=None) as b, node(A) as a:
        port = b.port
        await b.close()
        await b.admit(B)
        assert b.port == 0
        assert (await reached(a, port)).answer is Answer.REFUSED


# --- how a link ends ------------------------------------------------------------------------------


@paired
async def test_a_node_that_leaves_says_goodbye(a: TcpPeers, b: TcpPeers) -> None:
    link = await link_to(a, b.port)
    await b.close()
    assert await link.ended() is LinkEnd.GOODBYE


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_was_just_accepted_when_a_node_leaves_is_closed(turns: int) -> None:
    """The event loop makes a connection in several turns."""

    async def scenario() -> None:
        async with node() as peers:
            with socket.create_connection((HERE, peers.port), LIMIT_S) as watching:
                watching.sendall(b'rdzv-etcd peer 1 ["/p/job","b~2~x"]\n')
                for _ in range(turns):
                    await asyncio.sleep(0)
                await peers.close()
                await asyncio.to_thread(until_ended, watching)

    def until_ended(watching: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while watching.recv(1000):
                pass

    in_loop(scenario())


@pytest.mark.parametrize("turns", range(8))
def test_a_node_that_leaves_leaves_no_connection_to_the_end_of_the_loop(turns: int) -> None:
    async def scenario() -> None:
        peers = TcpPeers(silence_s=1.0)
        peers.listen_on(socket.create_server((HERE, 0)))
        await peers.admit(B)
        watching.connect((HERE, peers.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await peers.close()

    with socket.socket() as watching:
        gc.collect()  # what earlier tests left
        before = psutil.Process().num_fds()
        asyncio.run(scenario())
        assert psutil.Process().num_fds() <= before


@paired
async def test_a_node_may_stop_watching(a: TcpPeers, b: TcpPeers) -> None:
    link = await link_to(a, b.port)
    link.close()
    link.close()
    await link.ended()
    await until(lambda: not b.watchers)
    assert (await reached(a, b.port)).answer is Answer.SAME


@awaited
async def test_a_killed_process_is_refused_by_its_host() -> None:
    with other_process() as (process, port):
        async with node(A) as a:
            link = await link_to(a, port)
            process.kill()
            assert await link.ended() is LinkEnd.CLOSED
            await until_refused(a, port)


@awaited
async def test_a_stopped_process_keeps_its_links() -> None:
    with other_process() as (process, port):
        async with node(A) as a:
            link = await link_to(a, port)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(link.ended(), 2.5)  # longer than its silence
            assert (await reached(a, port, limit_s=0.2)).answer is Answer.HELD
            process.send_signal(signal.SIGCONT)
            assert (await reached(a, port)).answer is Answer.SAME


@paired
async def test_a_reset_on_the_way_closes_a_link(a: TcpPeers, b: TcpPeers) -> None:
    link = await link_to(a, b.port)
    (watcher,) = b.watchers
    assert watcher._transport is not None
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    sock = watcher._transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    watcher._transport.abort()
    assert await link.ended() is LinkEnd.CLOSED
    assert (await reached(a, b.port)).answer is Answer.SAME


def test_a_host_that_is_gone_falls_silent(network: Network) -> None:
    host = network.add_host()

    async def work() -> None:
        with other_process(address=host.address, host=host) as (_, port):
            async with node(A) as a:
                contact = await a.connect(host.address, port, B, LIMIT_S)
                assert contact.link is not None
                host.cut()
                try:
                    assert await contact.link.ended() is LinkEnd.SILENT
                    gone = await a.connect(host.address, port, B, 0.2)
                    assert gone.answer is not Answer.SAME  # a router may refuse in its place
                finally:
                    # What the kernel still tries to send would keep the namespace for minutes.
                    host.heal()

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


# --- children -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_child_does_not_keep_its_parent_alive(how: str) -> None:
    async def work() -> None:
        with other_process(how) as (process, port):
            async with node(A) as a:
                link = await link_to(a, port)
                process.send_signal(signal.SIGUSR1)
                child = int(await asyncio.to_thread(process.stdout.readline))
                try:
                    assert (await reached(a, port)).answer is Answer.SAME
                    process.kill()
                    assert await link.ended() is LinkEnd.CLOSED
                    await until_refused(a, port)
                    assert psutil.pid_exists(child)
                finally:
                    os.kill(child, signal.SIGKILL)

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


# --- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rubbish", RUBBISH, ids=range(len(RUBBISH)))
@paired
async def test_a_stranger_hears_nothing(a: TcpPeers, b: TcpPeers, rubbish: bytes) -> None:
    reader, writer = await asyncio.open_connection(HERE, b.port)
    with contextlib.suppress(ConnectionError):
        writer.write(rubbish)
        await writer.drain()
        assert await reader.read() == b""
    writer.transport.abort()
    assert (await reached(a, b.port)).answer is Answer.SAME


@paired
async def test_a_connection_that_sends_no_greeting_is_closed(
    a: TcpPeers, b: TcpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_GREETING_S", 0.2)
    reader, writer = await asyncio.open_connection(HERE, b.port)
    writer.write(b"rdzv-etcd pe")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.transport.abort()
    assert not b.watchers
    assert (await reached(a, b.port)).answer is Answer.SAME


@paired
async def test_a_crowd_that_sends_nothing_keeps_nobody_away(a: TcpPeers, b: TcpPeers) -> None:
    first = await reached(a, b.port)
    assert first.link is not None
    crowd = [await asyncio.open_connection(HERE, b.port) for _ in range(300)]
    await until(lambda: len(b.watchers) >= tcp._MAX_OF_A_KIND)
    assert len(b.watchers) <= tcp._MAX_OF_A_KIND + 1
    assert (await reached(a, b.port)).answer is Answer.SAME
    for _, writer in crowd:
        writer.transport.abort()


@paired
async def test_so_many_that_send_a_greeting_break_only_each_other_s_links(
    a: TcpPeers, b: TcpPeers
) -> None:
    """Any reader of the job's keys can; the next one takes the place of the oldest."""
    links = [(await reached(a, b.port)).link for _ in range(tcp._MAX_OF_A_KIND + 10)]
    assert all(links)
    assert len(b.watchers) <= tcp._MAX_OF_A_KIND
    assert links[0] is not None
    assert await links[0].ended() is LinkEnd.CLOSED
    assert (await reached(a, b.port)).answer is Answer.SAME


@paired
async def test_a_cancellation_in_the_moment_of_an_answer_is_not_swallowed(
    a: TcpPeers, b: TcpPeers
) -> None:
    """As `asyncio.wait_for` does before Python 3.12: a node that leaves would wait forever."""
    for turns in range(40):
        attempt = asyncio.ensure_future(reached(a, b.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = attempt.done()
        attempt.cancel()
        await asyncio.wait({attempt})
        assert attempt.cancelled() or was_done


@paired
async def test_no_thread_for_a_name_is_no_more_than_a_node_that_is_not_reached(
    a: TcpPeers, b: TcpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        contact = await a.connect("localhost", b.port, B, 5.0)
    assert contact.answer is Answer.UNREACHABLE
    assert "can't start new thread" in contact.why


@paired
async def test_anything_after_the_greeting_is_ignored(a: TcpPeers, b: TcpPeers) -> None:
    reader, writer = await asyncio.open_connection(HERE, b.port)
    writer.write(b'rdzv-etcd peer 1 ["/p/job","b~2~x"]\n')
    assert await reader.readline() == b"rdzv-etcd peer 1 yes\n"
    for _ in range(100):
        writer.write(b"x" * 100_000)
        await writer.drain()
    assert (await reached(a, b.port)).answer is Answer.SAME
    writer.transport.abort()
