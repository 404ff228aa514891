"""What most of these tests work on, and what runs the asynchronous ones."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Iterator

import pytest

from rdzv_etcd.settings.connection import Endpoint
from tests.etcd.tools import run
from tests.support.processes import free_port
from tests.support.servers import EtcdCluster, EtcdServer


@pytest.fixture
def server(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """A server of the test's own."""
    return fresh_etcd()


@pytest.fixture
def cluster(fresh_cluster: Callable[..., EtcdCluster]) -> EtcdCluster:
    """A cluster of the test's own, of three members."""
    return fresh_cluster(3)


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """A port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])


@pytest.fixture
def closed() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
