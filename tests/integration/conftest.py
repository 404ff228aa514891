"""An engine that answers, the images, and projects that leave nothing behind.

Without an engine these tests are skipped, unless ``RDZV_ETCD_REQUIRE_ENGINE=1``, under which they
fail. Nothing lives longer than these tests: others run after them in the same process.
``ETCD_IMAGE`` and ``NODE_IMAGE`` name images to use; otherwise images.py builds them.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

# Before testcontainers is imported: the image of its cleaner, Ryuk, cannot be had where no registry
# is reached. Projects are removed by their label instead.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

import docker
import docker.errors
import pytest

from tests.integration import images
from tests.integration.containers import Host, Project

_HOW = (
    "no container engine answers. As root on Debian, this installs and starts one for the tests: "
    "tests/integration/engine.sh python -m pytest -m '' tests/integration"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Images and containers are not started in the time that other tests have."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def engine() -> Iterator[docker.DockerClient]:
    """The engine's client."""
    client, problem = _connect()
    if client is None:
        if os.environ.get("RDZV_ETCD_REQUIRE_ENGINE") == "1":
            pytest.fail(f"{_HOW} ({problem})")
        pytest.skip(_HOW)
    yield client
    client.close()


def _connect() -> tuple[docker.DockerClient | None, str]:
    """Return the client of an engine that answers, or why there is none."""
    problem = ""
    with warnings.catch_warnings():
        # docker 7 does not close the socket that it could not connect.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return docker.from_env(timeout=300), ""
        except docker.errors.DockerException as error:
            problem = str(error)
        gc.collect()
    return None, problem


@pytest.fixture(scope="package")
def etcd_image(engine: docker.DockerClient) -> str:
    return _image("ETCD_IMAGE", images.ETCD_IMAGE)


@pytest.fixture(scope="package")
def node_image(engine: docker.DockerClient) -> str:
    return _image("NODE_IMAGE", images.NODE_IMAGE)


def _image(variable: str, local: str) -> str:
    named = os.environ.get(variable)
    if named:
        return named
    try:
        images.build(local)
    except images.ImageError as error:
        pytest.fail(f"{error}\nImages can also be named by ETCD_IMAGE and NODE_IMAGE.")
    return local


@pytest.fixture(scope="package")
def project(
    engine: docker.DockerClient,
    etcd_image: str,
    node_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Project]]:
    """A factory of started projects; takes Project's services and keywords."""
    with ExitStack() as stack:

        def make(*services: str, **options: object) -> Project:
            folder = tmp_path_factory.mktemp("compose")
            values = {"ETCD_IMAGE": etcd_image, "NODE_IMAGE": node_image, **options}
            return stack.enter_context(Project(engine, folder, *services, **values))  # type: ignore[arg-type]

        yield make


@pytest.fixture(scope="package")
def job(project: Callable[..., Project]) -> Project:
    """Three etcd nodes and training nodes, shared by all tests of a process: each begins with a
    healed one."""
    return project("node", NNODES="2:4")


@pytest.fixture
def healed(job: Project) -> Project:
    """The shared project with everything running and connected, whatever happened before."""
    for host in job.all_hosts():
        host.heal()
    return job


@pytest.fixture
def pair(healed: Project) -> list[Host]:
    """Two nodes that train in one world."""
    hosts = healed.scale("node", 2)
    healed.wait_for_world(hosts)
    return hosts


@pytest.fixture
def trio(healed: Project) -> list[Host]:
    """Three nodes that train in one world, the one of rank 0 first."""
    hosts = healed.scale("node", 3)
    ranks = {step.attempt: step.rank for step in healed.wait_for_world(hosts)}
    return sorted(hosts, key=lambda host: ranks[host.steps()[-1].attempt])
