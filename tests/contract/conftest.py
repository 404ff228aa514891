"""Runs every async test of this folder on the in-memory etcd and on each real version."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.lab import Lab, Runner, run_in_memory, run_on_server, run_simulated
from tests.support import versions
from tests.support.servers import EtcdBinary, EtcdServer, find_binaries

_KINDS = [
    pytest.param(run_in_memory, id="memory"),
    pytest.param(run_simulated, id="simulated"),
    *(pytest.param(binary, id=binary.label) for binary in find_binaries()),
]


@pytest.fixture(scope="session")
def shared_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[EtcdBinary], EtcdServer]]:
    """One server per version for the whole session, started when first asked for."""
    servers: dict[str, EtcdServer] = {}
    with ExitStack() as stack:

        def get(binary: EtcdBinary) -> EtcdServer:
            if binary.label not in servers:
                server = EtcdServer(binary, tmp_path_factory.mktemp("contract"))
                stack.callback(server.kill)
                servers[binary.label] = server.start_on_free_ports()
            return servers[binary.label]

        yield get


@pytest.fixture(params=_KINDS)
def lab(
    request: pytest.FixtureRequest,
    shared_server: Callable[[EtcdBinary], EtcdServer],
    tmp_path: Path,
) -> Iterator[Runner]:
    """Runs the test; with ``@pytest.mark.usefixtures("own_server")`` on a server of its own."""
    kind = request.param
    if not isinstance(kind, EtcdBinary):
        yield kind
    elif "own_server" in request.fixturenames:
        server = EtcdServer(kind, tmp_path).start_on_free_ports()
        yield run_on_server(server)
        server.kill()
    else:
        yield run_on_server(shared_server(kind))


@pytest.fixture
def own_server() -> None:
    """Marks tests that wipe or restart their server."""


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        collector.add_marker(versions.MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def test(lab: Lab)`` with the runner that the fixture ``lab`` chose."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    others = {name: pyfuncitem.funcargs[name] for name in names if name != "lab"}

    async def body(lab: Lab) -> None:
        await test(lab=lab, **others)

    run: Runner = pyfuncitem.funcargs["lab"]  # type: ignore[assignment]
    run(body)
    return True
