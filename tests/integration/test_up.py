"""``docker compose up`` as docs/deploy.md has it: trains to the end and exits with 0.

With one etcd node, which starts sooner and is the same in all else.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import docker
import pytest

from tests.integration.containers import PROJECT_PREFIX, compose_command, remove_project
from tests.integration.images import PROJECT


@pytest.fixture
def name(engine: docker.DockerClient) -> Iterator[str]:
    name = f"{PROJECT_PREFIX}{os.getpid()}-up"
    yield name
    remove_project(engine, name)


def test_up_trains_to_the_end(name: str, etcd_image: str, node_image: str) -> None:
    command = [*compose_command(), "--project-name", name, "--profile", "single"]
    command += ["up", "--no-build", "--abort-on-container-exit", "node-single"]
    variables = {
        "ETCD_IMAGE": etcd_image,
        "NODE_IMAGE": node_image,
        "ETCD_PORT_1": "",  # any free one
        "RDZV_CONF": "lease_ttl=5,last_call_timeout=2",
    }
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "test accuracy: 9" in done.stdout
