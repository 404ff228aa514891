"""Where the metrics of one node are shown: a text file, a port, or both.

The file is written by a thread of its own, and only if there is one: a file system that does not
answer must not keep a node's event loop from renewing its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import socketserver
import stat
import threading
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler, generate_latest

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.log_errors import errors_only_told
from rdzv_etcd.metrics.prometheus import Page, PrometheusRecorder
from rdzv_etcd.settings import Settings

_log = logging.getLogger("rdzv_etcd")

AGENTS = 1000
"""More do not share a file's name on one host."""
_ANSWERS_S = 10.0
"""A file system that takes longer at the start is refused …"""
_LAST_WORD_S = 5.0
"""… and at the end nobody waits for it longer than this."""
_REQUEST_S = 10.0
"""Who connects to the port and asks for nothing is sent away after this."""


class Outputs:
    """What the options of one node ask for, until it is closed."""

    def __init__(
        self, recorder: PrometheusRecorder, settings: Settings, beside: socket.socket
    ) -> None:
        """The port listens at the addresses at which ``beside`` does. Blocks for some seconds if
        a file system does not answer. Raises SettingsError."""
        self._file: TextFile | None = None
        self._port: Port | None = None
        job = f"[job {settings.job_id}]"
        if settings.metrics_port is not None:
            self._port = Port(Page(recorder, {}).registry(), settings.metrics_port, beside)
            # Who lets it be chosen has to be told, at torchrun's default level, too.
            level = logging.WARNING if settings.metrics_port == 0 else logging.INFO
            with errors_only_told:
                _log.log(level, "%s metrics at port %d, path /metrics", job, self._port.number)
        if settings.metrics_file is not None:
            try:
                self._file = TextFile(recorder, settings.metrics_file, job)
            except BaseException:
                self._close_port()
                raise
            recorder.follow(self._file.changed)

    async def close(self) -> None:
        """Write the file once more, and give the port back. Never raises; idempotent."""
        self._close_port()
        if self._file is not None:
            await self._file.close()

    def _close_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()


class TextFile:
    """A file for the text-file collector of Prometheus' node exporter.

    Whoever writes it holds a lock on it. An agent that finds it locked takes the next name, and
    what a dead one has left is taken over. The exporter reads all files of a folder as one, so each
    series has the file's name in a label.
    """

    def __init__(self, recorder: PrometheusRecorder, path: Path, job: str) -> None:
        """Write it for the first time. Raises SettingsError if that cannot be done."""
        self._recorder = recorder
        self._wanted = path
        self._job = job
        self._news = threading.Event()
        self._ending = False
        self._told = ""
        self._held = -1
        """The descriptor that holds the lock."""
        self._failure: SettingsError | None = None
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._has_ended = False
        self._at_end: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        threading.Thread(target=self._run, name="rdzv-etcd metrics", daemon=True).start()
        if not self._begun.wait(_ANSWERS_S):
            self._ending = True
            raise SettingsError(
                f"metrics_file={str(path)!r} cannot be written: its file system has not answered "
                f"for {_ANSWERS_S:g} s"
            )
        if self._failure is not None:
            raise self._failure

    def changed(self) -> None:
        """Have it written again, soon; does not wait for that."""
        self._news.set()

    async def close(self) -> None:
        """Have it written for the last time, and wait for that as long as makes sense."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._has_ended:
                return
            self._at_end.append((loop, ended))
        self._ending = True
        self._news.set()
        await asyncio.wait({ended}, timeout=_LAST_WORD_S)
        if not ended.done():
            with errors_only_told:
                _log.warning(
                    "%s %s may lack the last metrics: its file system has not answered for %g s",
                    self._job,
                    self._wanted,
                    _LAST_WORD_S,
                )

    # -- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                path, self._held = _claim(self._wanted)
            except OSError as error:
                self._failure = SettingsError(
                    f"metrics_file={str(self._wanted)!r} cannot be written: "
                    f"{error.strerror or error}"
                )
                return
            except SettingsError as error:
                self._failure = error
                return
            try:
                self._keep_writing(path)
            finally:
                os.close(self._held)
        finally:
            self._begun.set()
            with self._lock:
                self._has_ended = True
            for loop, ended in self._at_end:
                with contextlib.suppress(RuntimeError):  # nobody waits any more
                    loop.call_soon_threadsafe(_done, ended)

    def _keep_writing(self, path: Path) -> None:
        registry = Page(self._recorder, {"file": path.stem}).registry()
        ending = False
        while not ending:
            self._news.clear()  # first: what is told from here on is written next time
            ending = self._ending
            try:
                self._held = _replace(path, generate_latest(registry), self._held)
                self._told = ""
            except OSError as error:
                if not self._begun.is_set():
                    self._failure = SettingsError(
                        f"metrics_file={str(path)!r} cannot be written: {error.strerror or error}"
                    )
                    return
                self._complain(path, error)
            self._begun.set()
            if not ending:
                self._news.wait()

    def _complain(self, path: Path, error: OSError) -> None:
        text = error.strerror or str(error)
        if text != self._told:
            self._told = text
            with errors_only_told:
                _log.warning("%s the metrics in %s are old ones: %s", self._job, path, text)


def _done(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _claim(wanted: Path) -> tuple[Path, int]:
    """Lock the file, or the first of the next names that nobody holds; make it if need be."""
    for number in range(1, AGENTS + 1):
        name = wanted.stem if number == 1 else f"{wanted.stem}-{number}"
        path = wanted.with_name(name + wanted.suffix)
        held = _lock(path)
        if held is not None:
            return path, held
    raise SettingsError(
        f"metrics_file={str(wanted)!r}: {AGENTS} agents write files of that name already"
    )


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of the file at that path; ``None`` if another one does."""
    while True:
        # Not blocking: whoever has put a pipe there gets an error.
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(held).st_mode):
                raise OSError(0, "it is there, and no file")
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), path.stat()):
                return held
        except BlockingIOError:
            os.close(held)
            return None
        except FileNotFoundError:
            pass  # removed in this moment
        except BaseException:
            os.close(held)
            raise
        os.close(held)  # its owner has just replaced it: look who holds the new one


def _replace(path: Path, text: bytes, held: int) -> int:
    """Put a new file in the place of the one that is held, at once as a whole, and hold that."""
    new = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    written = os.open(new, flags, 0o666)
    try:
        fcntl.flock(written, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(written, rest) :]
        new.replace(path)
    except BaseException:
        os.close(written)
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    os.close(held)
    return written


class _Handler(MetricsHandler):
    timeout = _REQUEST_S


class _Server(socketserver.ThreadingTCPServer):
    """Not http.server's, which looks up this host's name, and that may take long."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, family: int, place: tuple[Any, ...], handler: type) -> None:
        self.address_family = family
        super().__init__(place, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Whoever asked has gone, or is no HTTP client."""
        with errors_only_told:
            _log.debug("a request for metrics from %s failed", client_address, exc_info=True)


class Port:
    """An HTTP server for the metrics, with a thread of its own."""

    def __init__(self, registry: CollectorRegistry, number: int, beside: socket.socket) -> None:
        """Raises SettingsError if the port cannot be had."""
        place = beside.getsockname()
        handler = _Handler.factory(registry)
        try:
            self._server = _Server(beside.family, (place[0], number, *place[2:]), handler)
        except OSError as error:
            raise SettingsError(
                f"metrics_port={number} cannot be had at {place[0]}: {error.strerror or error}. "
                "Each agent of a host needs a port of its own: give another one, 0 for any that is "
                "free, or metrics_file="
            ) from None
        self.number: int = self._server.server_address[1]
        name = "rdzv-etcd metrics port"
        threading.Thread(target=self._server.serve_forever, name=name, daemon=True).start()

    def close(self) -> None:
        """Give the port back."""
        with contextlib.suppress(OSError):  # wakes the thread, which would look twice a second
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
