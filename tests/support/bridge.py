"""A TCP bridge that hurts: between clients and one server, it delays, stalls, drops and resets.

Knows sockets and bytes; knows nothing of what they mean. It works in one thread with an event loop
of its own and wakes only when bytes or commands come.

What can be emulated above TCP, and how:

* ``shape``: delay, jitter and bandwidth as they are; loss as what it does to a TCP stream, a stall
  until the retransmission comes.
* ``black_hole``: nothing passes, in one direction or both; connections stay, new ones are accepted.
  What was sent meanwhile arrives after ``heal``, as TCP would deliver it.
* ``half_open``: the server's ends of all connections are closed; the clients' ends stay and receive
  nothing, as after a power cut. New connections work.
* ``reset``: every connection is reset; new ones work.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

_CHUNK = 64 * 1024
_SHORTEST_RTO_S = 0.2  # TCP_RTO_MIN in Linux


class Direction(Flag):
    """Which way bytes go."""

    TO_SERVER = auto()
    TO_CLIENT = auto()
    BOTH = TO_SERVER | TO_CLIENT


@dataclass(frozen=True)
class Shape:
    """What happens to bytes that pass. All zero: nothing."""

    delay_s: float = 0.0
    """One way; a round trip takes twice as long."""
    jitter_s: float = 0.0
    """Up to so much is added to each chunk's delay; order is kept."""
    loss: float = 0.0
    """The part of all chunks that are held up by one retransmission."""
    bytes_per_s: float = 0.0
    """0: unlimited."""


class FaultBridge:
    """Listens on ``host`` and forwards to the server; commands take effect before they return."""

    def __init__(
        self, server: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0, seed: int = 0
    ) -> None:
        self.host = host
        self.port = port
        self.connections = 0
        """How many connections were accepted so far."""
        self._server = server
        self._random = random.Random(seed)
        self._shape = Shape()
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._gates = {one: asyncio.Event() for one in (Direction.TO_SERVER, Direction.TO_CLIENT)}
        self._thread = threading.Thread(target=self._run, name="fault-bridge", daemon=True)
        self._thread.start()
        try:
            self._call(self._heal)
        except BaseException:
            self._stop()
            raise

    @property
    def endpoint(self) -> str:
        """``http://host:port``; for another scheme use :attr:`target`."""
        return f"http://{self.target}"

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"

    # -- commands ---------------------------------------------------------------------------------

    def shape(
        self,
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        bytes_per_s: float = 0.0,
    ) -> None:
        """Replace the shape, for chunks that come from now on, of old connections too."""
        self._shape = Shape(delay_s, jitter_s, loss, bytes_per_s)

    def black_hole(self, direction: Direction = Direction.BOTH) -> None:
        """Let nothing pass; see the module's text."""
        self._call(lambda: self._close_gates(direction))

    def half_open(self) -> None:
        """Close the server's ends only."""
        self._call(self._half_open)

    def reset(self) -> None:
        """Reset every connection."""
        self._call(self._reset)

    def refuse(self) -> None:
        """Reset every connection and refuse new ones."""
        self._call(self._refuse)

    def heal(self) -> None:
        """End all of it, the shape included. Half-open connections stay dead."""
        self._shape = Shape()
        self._call(self._heal)

    def close(self) -> None:
        """Reset every connection and stop the thread. Idempotent."""
        if self._thread.is_alive():
            self._call(self._refuse)
            self._stop()

    def __enter__(self) -> FaultBridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, command: Callable[[], object]) -> None:
        async def obey() -> None:
            result = command()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(obey(), self._loop).result(30.0)

    async def _heal(self) -> None:
        for gate in self._gates.values():
            gate.set()
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._listener = await asyncio.start_server(
                self._accept, self.host, self.port, family=family, reuse_address=True
            )
            self.port = self._listener.sockets[0].getsockname()[1]

    def _close_gates(self, direction: Direction) -> None:
        for one, gate in self._gates.items():
            if one in direction:
                gate.clear()

    async def _half_open(self) -> None:
        for link in tuple(self._links):
            await link.lose_server()

    async def _reset(self) -> None:
        links = tuple(self._links)
        for link in links:
            link.reset()
        for link in links:
            await link.ended.wait()
        await asyncio.sleep(0)  # transports report their end in the next turn of the loop

    async def _refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        await self._reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(reader, writer)
        self._links.add(link)
        try:
            await link.run(self._server, self._gates, self._lag_s)
        finally:
            self._links.discard(link)
            link.ended.set()

    def _lag_s(self, size: int) -> tuple[float, float]:
        """Return the delay of a chunk, and how long it occupies the line."""
        shape = self._shape
        delay_s = shape.delay_s + self._random.random() * shape.jitter_s
        if shape.loss and self._random.random() < shape.loss:
            delay_s += max(_SHORTEST_RTO_S, 2 * shape.delay_s)
        return delay_s, size / shape.bytes_per_s if shape.bytes_per_s else 0.0


class _Link:
    """One client's connection and its counterpart at the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._cut = asyncio.Event()
        self._server_lost = False
        self._work: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    async def run(
        self,
        server: tuple[str, int],
        gates: dict[Direction, asyncio.Event],
        lag_s: Callable[[int], tuple[float, float]],
    ) -> None:
        cut = asyncio.create_task(self._cut.wait())
        work = self._work = asyncio.create_task(self._forward(server, gates, lag_s))
        tasks: tuple[asyncio.Task[Any], ...] = (cut, work)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._server_lost and not self._cut.is_set():
                await cut  # the client's connection leads nowhere
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._abort()

    async def lose_server(self) -> None:
        self._server_lost = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work})
        if self._server is not None:
            self._server[1].transport.abort()

    def reset(self) -> None:
        self._cut.set()

    def _abort(self) -> None:
        for end in (self._client, self._server):
            if end is not None:
                _make_close_a_reset(end[1])
                end[1].transport.abort()

    async def _forward(
        self,
        server: tuple[str, int],
        gates: dict[Direction, asyncio.Event],
        lag_s: Callable[[int], tuple[float, float]],
    ) -> None:
        await gates[Direction.TO_SERVER].wait()
        try:
            self._server = await asyncio.open_connection(*server)
        except OSError:
            return  # the server is away: the client is reset
        (from_client, to_client), (from_server, to_server) = self._client, self._server
        pumps = [
            asyncio.ensure_future(_pump(from_client, to_server, gates[Direction.TO_SERVER], lag_s)),
            asyncio.ensure_future(_pump(from_server, to_client, gates[Direction.TO_CLIENT], lag_s)),
        ]
        try:
            # A half-closed connection is no use to gRPC: the end of one direction ends both.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    gate: asyncio.Event,
    lag_s: Callable[[int], tuple[float, float]],
) -> None:
    """Carry bytes one way until either end is gone."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
    delivering = asyncio.ensure_future(_deliver(queue, sink, gate))
    loop = asyncio.get_running_loop()
    last_s = 0.0
    try:
        with contextlib.suppress(OSError):
            while chunk := await source.read(_CHUNK):
                delay_s, line_s = lag_s(len(chunk))
                last_s = max(last_s, loop.time() + delay_s) + line_s
                await queue.put((last_s, chunk))
        await queue.put((last_s, b""))
        await delivering
    finally:
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)


async def _deliver(
    queue: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter, gate: asyncio.Event
) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while True:
            due_s, chunk = await queue.get()
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            await gate.wait()
            if not chunk:
                return
            sink.write(chunk)
            await sink.drain()


def _make_close_a_reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
