"""The store under test, on the in-memory etcd and on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest

from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Etcd, Get, Txn
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings.connection import Connection, Endpoint
from rdzv_etcd.testing import MemoryConnection, MemoryEtcd
from rdzv_etcd.torch_plugin.store import EtcdStore
from rdzv_etcd.world.round_store import RoundStore
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdBinary, EtcdServer
from tests.support.versions import versions_for

GENEROUS = timedelta(seconds=60)
"""For what must happen; a slow machine may take a while."""
BRIEF = timedelta(milliseconds=50)
"""For what must not happen."""


class Two:
    """A whole number that is no ``int``."""

    def __index__(self) -> int:
        return 2


@dataclass(frozen=True)
class Place:
    """An etcd, the loop it lives on, and where in it the store is."""

    loop_thread: LoopHold
    etcd: Etcd
    keys: KeyRange
    lease_id: int

    def round_store(self) -> RoundStore:
        return RoundStore(self.etcd, self.loop_thread, self.keys, self.lease_id)

    def open(self, timeout: timedelta = GENEROUS) -> EtcdStore:
        """Open a store on the place's keys, as one node does."""
        return EtcdStore(self.round_store(), timeout=timeout)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """No module leaves a thread or a socket; looking after every test would take longer than it."""
    check = LeakCheck()
    yield
    check.check()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backing" in metafunc.fixturenames:
        real = [pytest.param(each, id=each.label) for each in versions_for(metafunc)]
        kinds = [pytest.param(None, id="memory"), *real]
        metafunc.parametrize("backing", kinds, indirect=True, scope="package")


@pytest.fixture(scope="package")
def backing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer | None]:
    """A real server, or ``None`` for the in-memory etcd."""
    binary: EtcdBinary | None = request.param
    if binary is None:
        yield None
        return
    real = EtcdServer(binary, tmp_path_factory.mktemp(f"store-{binary.label}"))
    real.start_on_free_ports()
    yield real
    real.kill()


@pytest.fixture
def place(backing: EtcdServer | None, job_id: str) -> Iterator[Place]:
    """Where one test's store is; afterwards revoking the job's lease must have removed it all."""
    with place_on(backing, job_id) as place:
        yield place
        run, etcd, job = place.loop_thread.run, place.etcd, JobKeys("/rdzv_etcd", job_id)
        assert run(etcd.revoke(place.lease_id))
        left = run(etcd.get(Get(job.below.start, job.below.end, keys_only=True)))
        assert left.kvs == ()


@contextmanager
def place_on(server: EtcdServer | None, job_id: str) -> Iterator[Place]:
    """Begin a store on that etcd, ``None`` for one in memory."""
    with LoopHold.acquire() as loop_thread, _connected(loop_thread, server) as etcd:
        lease_id = loop_thread.run(etcd.grant(600)).lease_id
        keys = JobKeys("/rdzv_etcd", job_id).store(1, "run")
        loop_thread.run(etcd.txn(Txn((), (StoreKeys(keys).begin(lease_id),))))
        yield Place(loop_thread, etcd, keys, lease_id)


@pytest.fixture
def open_store(place: Place) -> Callable[[], EtcdStore]:
    return place.open


@pytest.fixture
def store(place: Place) -> EtcdStore:
    return place.open()


@contextmanager
def _connected(loop_thread: LoopHold, server: EtcdServer | None) -> Iterator[Etcd]:
    if server is None:
        memory, etcd = loop_thread.run(_memory())
        yield etcd
        loop_thread.run(memory.close())
    else:
        where = Connection((Endpoint(server.host, server.port),))
        client = EtcdClient(where)
        yield client
        loop_thread.run(client.close())


async def _memory() -> tuple[MemoryEtcd, MemoryConnection]:
    server = MemoryEtcd()
    return server, server.connect()
