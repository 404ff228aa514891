"""The fault bridge keeps its promises, as plain sockets see them."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.bridge import Direction, FaultBridge

_LIMIT_S = 30.0
_QUIET_S = 0.3


class Echo(socketserver.ThreadingTCPServer):
    """A server that sends back what it gets; ``ended`` counts connections it saw ending."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.at: tuple[str, int] = self.socket.getsockname()
        self.ended = threading.Semaphore(0)


class Answer(socketserver.BaseRequestHandler):
    server: Echo

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # reset by the bridge: an end like any other
            while got := self.request.recv(65536):
                self.request.sendall(got)
        self.server.ended.release()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


@pytest.fixture
def bridge(echo: Echo) -> Iterator[FaultBridge]:
    with FaultBridge(echo.at) as made:
        yield made


@pytest.fixture
def client(bridge: FaultBridge) -> Iterator[socket.socket]:
    with connect(bridge) as made:
        assert ask(made, b"hello") == b"hello"
        yield made


def connect(bridge: FaultBridge) -> socket.socket:
    return socket.create_connection((bridge.host, bridge.port), _LIMIT_S)


def ask(client: socket.socket, words: bytes) -> bytes:
    client.sendall(words)
    return receive(client, len(words))


def receive(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        piece = client.recv(65536)
        if not piece:
            raise ConnectionError(f"ended after {len(got)} of {size} bytes")
        got += piece
    return got


def is_quiet(client: socket.socket) -> bool:
    """Whether nothing comes for a while, neither bytes nor an end."""
    client.settimeout(_QUIET_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(_LIMIT_S)
    return False


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"delay_s": 0.1}, id="a delay counts in each direction"),
        pytest.param({"bytes_per_s": 100_000}, id="bandwidth is limited"),
    ],
)
def test_what_is_slow_takes_time(
    bridge: FaultBridge, client: socket.socket, shape: dict[str, float]
) -> None:
    bridge.shape(**shape)
    started_s = time.monotonic()
    assert ask(client, b"x" * 20_000) == b"x" * 20_000
    assert time.monotonic() - started_s >= 0.2


def test_loss_is_a_stall_and_keeps_the_order(bridge: FaultBridge, client: socket.socket) -> None:
    bridge.shape(loss=0.5, jitter_s=0.01)
    started_s = time.monotonic()
    for number in range(8):
        client.sendall(b"%d" % number)
        time.sleep(0.005)  # chunks of their own
    assert receive(client, 8) == b"01234567"
    assert time.monotonic() - started_s >= 0.2


def test_a_black_hole_swallows_until_it_is_healed(
    bridge: FaultBridge, client: socket.socket
) -> None:
    bridge.black_hole()
    client.sendall(b"lost?")
    assert is_quiet(client)
    with connect(bridge) as fresh:
        fresh.sendall(b"also")
        assert is_quiet(fresh)
        bridge.heal()
        assert receive(fresh, 4) == b"also"
    assert receive(client, 5) == b"lost?"


def test_a_black_hole_may_have_a_direction(bridge: FaultBridge, client: socket.socket) -> None:
    bridge.black_hole(Direction.TO_CLIENT)
    client.sendall(b"heard")
    assert is_quiet(client)
    bridge.heal()
    assert receive(client, 5) == b"heard"


def test_half_open_is_an_end_for_the_server_only(
    bridge: FaultBridge, client: socket.socket, echo: Echo
) -> None:
    bridge.half_open()
    assert echo.ended.acquire(timeout=_LIMIT_S)
    client.sendall(b"anybody?")
    assert is_quiet(client)
    with connect(bridge) as fresh:
        assert ask(fresh, b"new") == b"new"


def test_reset_is_seen_by_both_and_new_connections_work(
    bridge: FaultBridge, client: socket.socket, echo: Echo
) -> None:
    bridge.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.ended.acquire(timeout=_LIMIT_S)
    with connect(bridge) as fresh:
        assert ask(fresh, b"new") == b"new"


def test_a_server_that_is_away_resets_who_asks() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: nobody else gets the port either
        at = nobody.getsockname()
        # The reset may come before the client has begun to ask.
        with FaultBridge(at) as bridge, pytest.raises(ConnectionError), connect(bridge) as client:
            ask(client, b"hello")
