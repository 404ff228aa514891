"""TLS, client certificates, user and password between containers, and what is refused without."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.integration.containers import ALLREDUCE, CONF, Host, Project

_REFUSED = f"{CONF},ca_cert=/certificates/ca.pem,connect_timeout=20"  # busy machines are slow


@pytest.fixture(scope="module")
def tls(project: Callable[..., Project]) -> Project:
    """Three etcd nodes with certificates and users made by the project's own services."""
    return project("node-tls", profiles=["tls"], TRAINING=ALLREDUCE)


def test_a_world_over_tls(tls: Project) -> None:
    nodes = tls.hosts("node-tls")
    tls.wait_for_world(nodes)
    tls.expect_undisturbed(nodes, 3)


def test_without_a_client_certificate_the_last_line_says_why(tls: Project) -> None:
    """torchrun ends by itself, with a code that is not 0. All other refusals are the same outside a
    container (tests/etcd, tests/torchrun)."""
    name = f"{tls.name}-refused"
    variable = f"PET_RDZV_CONF={_REFUSED}"
    tls.compose("run", "--detach", "--no-deps", "--name", name, "-e", variable, "node-tls")
    refused = Host(tls.client.containers.get(name))
    try:
        assert refused.wait() != 0
        last = refused.output().rstrip().rpartition("\n")[2]
        assert re.search("(?i)certificate", last), refused.output()[-3000:]
    finally:
        refused.container.remove(force=True)
