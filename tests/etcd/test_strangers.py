"""Servers that answer on the port and are no etcd: named with what is wrong."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rdzv_etcd.errors import EtcdError, EtcdUnavailableError, InvalidRequestError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.settings.connection import Connection, Endpoint
from tests.etcd.tools import InOrder, run


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextmanager
def http1() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def another_grpc() -> Iterator[int]:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def failure(port: int, connect_timeout_s: float) -> EtcdError:
    async def scenario() -> EtcdError:
        endpoints = (Endpoint("127.0.0.1", port),)
        made = Connection(endpoints, connect_timeout_s=connect_timeout_s)
        client = EtcdClient(made, InOrder())
        try:
            with pytest.raises(EtcdError) as failed:
                await client.connect()
            return failed.value
        finally:
            await client.close()

    return run(scenario())


def test_a_web_server_is_told_to_be_no_etcd() -> None:
    with http1() as port:
        error = failure(port, 1.0)
    assert isinstance(error, EtcdUnavailableError)
    assert f"http://127.0.0.1:{port}: it answers, but is not etcd" in str(error)


def test_another_grpc_server_is_told_at_once_with_its_endpoint() -> None:
    with another_grpc() as port:
        error = failure(port, 600.0)
    assert isinstance(error, InvalidRequestError)
    assert f"http://127.0.0.1:{port}: this server does not offer etcd's v3 API" in str(error)
