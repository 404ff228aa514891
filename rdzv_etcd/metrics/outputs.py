"""Where the metrics of one node are shown: a text file, a port, or both.

prometheus_client writes the file and serves the port. The file is written on a thread of its own,
and only if there is one: a file system that does not answer must not keep a node's event loop from
renewing its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from prometheus_client import start_http_server, write_to_textfile

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics.prometheus import Page, PrometheusRecorder
from rdzv_etcd.settings import Settings

_log = logging.getLogger("rdzv_etcd")

_START_LIMIT_S = 10.0
"""A file system that takes longer for the first write is refused."""
_END_LIMIT_S = 5.0
"""How long closing waits for the last write."""


class Outputs:
    """The metrics file and port of one node."""

    def __init__(
        self, recorder: PrometheusRecorder, settings: Settings, same_interface_as: socket.socket
    ) -> None:
        """The port listens at the address at which the given socket does. Blocks for some seconds
        if a file system does not answer. Raises SettingsError."""
        self._file: TextFile | None = None
        self._port: Port | None = None
        job = f"[job {settings.job_id}]"
        if settings.metrics_port is not None:
            self._port = Port(recorder, settings.metrics_port, same_interface_as)
            # A port that the kernel chose must be visible at torchrun's default log level.
            level = logging.WARNING if settings.metrics_port == 0 else logging.INFO
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
    """A file for the text-file collector of Prometheus' node exporter, of one agent.

    The exporter reads all files of a folder as one page, so each series has the file's name in a
    label.
    """

    def __init__(self, recorder: PrometheusRecorder, path: Path, job: str) -> None:
        """Write it for the first time. Raises SettingsError if that fails."""
        self._registry = Page(recorder, {"file": path.stem}).registry()
        self._path = path
        self._job = job
        self._news = threading.Event()
        self._ending = False
        self._logged = ""
        self._first: list[OSError | None] = []
        """The outcome of the first write, once it is known."""
        self._begun = threading.Event()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # nobody can cancel the thread
        if path.exists() and not path.is_file():
            raise self._refused("there is something else than a file")
        threading.Thread(target=self._run, name="rdzv-etcd metrics", daemon=True).start()
        if not self._begun.wait(_START_LIMIT_S):
            self._ending = True
            raise self._refused(f"its file system has not answered for {_START_LIMIT_S:g} s")
        (error,) = self._first
        if error is not None:
            raise self._refused(error.strerror or str(error))

    def changed(self) -> None:
        """Have it written again, soon; does not wait for that."""
        self._news.set()

    async def close(self) -> None:
        """Have it written for the last time, and wait for that, within a limit."""
        self._ending = True
        self._news.set()
        # No executor: at the interpreter's exit there is none any more.
        await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=_END_LIMIT_S)
        if not self._ended.done():
            _log.warning(
                "%s %s may lack the last metrics: its file system has not answered for %g s",
                self._job,
                self._path,
                _END_LIMIT_S,
            )

    def _refused(self, why: str) -> SettingsError:
        return SettingsError(f"metrics_file={str(self._path)!r} cannot be written: {why}")

    # -- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._first.append(self._write())
            self._begun.set()
            while self._first == [None] and not self._ending:
                self._news.wait()
                self._news.clear()  # first: a change from here on is written next time
                self._complain(self._write())
        finally:
            self._ended.set_result(None)

    def _write(self) -> OSError | None:
        try:
            write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            return error
        return None

    def _complain(self, error: OSError | None) -> None:
        text = "" if error is None else error.strerror or str(error)
        if text and text != self._logged:
            _log.warning("%s the metrics in %s are old ones: %s", self._job, self._path, text)
        self._logged = text


class Port:
    """An HTTP server for the metrics, with a thread of its own."""

    def __init__(
        self, recorder: PrometheusRecorder, number: int, same_interface_as: socket.socket
    ) -> None:
        """Raises SettingsError if the port cannot be listened on."""
        host, _ = socket.getnameinfo(same_interface_as.getsockname(), socket.NI_NUMERICHOST)
        try:
            self._server, _ = start_http_server(number, host, Page(recorder, {}).registry())
        except OSError as error:
            raise SettingsError(
                f"metrics_port={number}: cannot listen on it at {host}: "
                f"{error.strerror or error}. Each agent of a host needs a port of its own: give "
                "another one, 0 for any that is free, or metrics_file="
            ) from None
        self._server.handle_error = _failed  # type: ignore[method-assign] # it prints to stderr
        self.number: int = self._server.server_port

    def close(self) -> None:
        """Give the port back."""
        with contextlib.suppress(OSError):  # wakes the thread, which would look twice a second
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


def _failed(request: Any, client_address: Any) -> None:  # noqa: ARG001
    """The client has gone, or does not speak HTTP."""
    _log.debug("a request for metrics from %s failed", client_address, exc_info=True)
