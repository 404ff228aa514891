"""Where the metrics of one node are shown: a text file, a port, or both.

prometheus_client writes the file and serves the port. The file is written on a thread: a file
system that does not answer must neither keep a node's event loop from renewing its lease, nor a
node from starting without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from pathlib import Path
from typing import Any

from prometheus_client import start_http_server, write_to_textfile

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics.prometheus import Page, PrometheusRecorder
from rdzv_etcd.process import begun_in_thread, wait_for_result
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
        """The port listens at the address of the given socket. Blocks for some seconds if a file
        system does not answer. Raises SettingsError."""
        self._file: TextFile | None = None
        self._server: Any = None
        job = f"[job {settings.job_id}]"
        if settings.metrics_port is not None:
            self._server = _serve(recorder, settings.metrics_port, same_interface_as)
            # A port that the kernel chose must be visible at torchrun's default log level.
            level = logging.WARNING if settings.metrics_port == 0 else logging.INFO
            _log.log(level, "%s metrics at port %d, path /metrics", job, self._server.server_port)
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
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(OSError):  # wakes its thread, which would look twice a second
                server.socket.shutdown(socket.SHUT_RDWR)
            server.shutdown()
            server.server_close()


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
        if path.exists() and not path.is_file():
            raise self._refused("it exists and is not a file")
        try:
            first = begun_in_thread(self._write, "rdzv-etcd metrics")
            if not wait_for_result(first, _START_LIMIT_S):
                raise self._refused(f"its file system has not answered for {_START_LIMIT_S:g} s")
            first.result()
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        self._thread = begun_in_thread(self._run, "rdzv-etcd metrics")

    def changed(self) -> None:
        """Write it again soon; does not wait for that."""
        self._news.set()

    async def close(self) -> None:
        """Write it for the last time, and wait for that, within a limit."""
        self._ending = True
        self._news.set()
        # No executor: at the interpreter's exit there is none any more.
        await asyncio.wait({asyncio.wrap_future(self._thread)}, timeout=_END_LIMIT_S)
        if not self._thread.done():
            _log.warning(
                "%s %s may lack the last metrics: its file system has not answered for %g s",
                self._job,
                self._path,
                _END_LIMIT_S,
            )

    def _refused(self, why: str) -> SettingsError:
        return SettingsError(f"metrics_file={str(self._path)!r} cannot be written: {why}")

    def _run(self) -> None:
        """Write the file at every change; on the thread."""
        logged, last = "", False
        while not last:
            self._news.wait()
            # Both before the write: what changes from here on is written next time.
            self._news.clear()
            last = self._ending
            try:
                self._write()
                logged = ""
            except Exception as error:  # noqa: BLE001 - else the file grows old unnoticed
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if why != logged:
                    _log.warning(
                        "%s cannot update the metrics in %s: %s", self._job, self._path, why
                    )
                logged = why

    def _write(self) -> None:
        write_to_textfile(str(self._path), self._registry)


def _serve(recorder: PrometheusRecorder, number: int, same_interface_as: socket.socket) -> Any:
    """Return an HTTP server for the metrics, with a thread of its own. Raises SettingsError if the
    port cannot be listened on."""
    host, _ = socket.getnameinfo(same_interface_as.getsockname(), socket.NI_NUMERICHOST)
    try:
        server, _ = start_http_server(number, host, Page(recorder, {}).registry())
    except OSError as error:
        where = f"[{host}]" if ":" in host else host
        raise SettingsError(
            f"cannot listen on {where}:{number} (metrics_port): {error.strerror or error}. Each "
            "agent of a host needs a port of its own: give another one, 0 for any that is free, or "
            "metrics_file="
        ) from None
    server.handle_error = _log_failed_request  # type: ignore[method-assign] # it prints to stderr
    return server


def _log_failed_request(request: Any, client_address: Any) -> None:  # noqa: ARG001
    """The client has gone, or does not speak HTTP."""
    _log.debug("a request for metrics from %s failed", client_address, exc_info=True)
