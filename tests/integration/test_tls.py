"""TLS, client certificates, user and password between containers, and what is refused without."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.integration.containers import ALLREDUCE, CONF, Host, Project

_OURS = "ca_cert=/certificates/ca.pem"
_CLIENT = "cert=/certificates/client.pem,key=/certificates/client-key.pem"
_FOREIGN = "cert=/certificates/foreign.pem,key=/certificates/foreign-key.pem"
_CERTIFICATE = "(?i)certificate"
_FOR_CI = "no client certificate"
"""The client's refusals are the same outside a container (tests/etcd, tests/torchrun)."""
_CONTACT = "connect_timeout=20"  # a busy machine must not turn a refusal into a time-out


@pytest.fixture(scope="module")
def tls(project: Callable[..., Project]) -> Project:
    """Three etcd nodes with certificates and users made by the project's own services."""
    return project("node-tls", profiles=["tls"], TRAINING=ALLREDUCE)


def test_a_world_over_tls(tls: Project) -> None:
    nodes = tls.hosts("node-tls")
    tls.wait_for_world(nodes)
    tls.expect_undisturbed(nodes, 3)


@pytest.mark.parametrize(
    ("options", "password", "expected"),
    [
        pytest.param(*each, id=what, marks=[] if what == _FOR_CI else pytest.mark.release)
        for what, each in {
            "foreign CA": (f"ca_cert=/certificates/foreign-ca.pem,{_CLIENT}", None, _CERTIFICATE),
            "foreign client certificate": (f"{_OURS},{_FOREIGN}", None, _CERTIFICATE),
            _FOR_CI: (_OURS, None, _CERTIFICATE),
            "wrong password": (f"{_OURS},{_CLIENT}", "not-the-password", "(?i)password"),
        }.items()
    ],
)
def test_refused_with_a_clear_last_line(
    tls: Project, options: str, password: str | None, expected: str
) -> None:
    """torchrun ends by itself, with a code that is not 0, and says why in its last line."""
    variables = {"PET_RDZV_CONF": f"{CONF},{_CONTACT},{options}"}
    if password is not None:
        variables["RDZV_ETCD_PASSWORD"] = password
    words = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    tls.compose("run", "--detach", "--no-deps", "--name", f"{tls.name}-refused", *words, "node-tls")
    refused = Host(tls.client.containers.get(f"{tls.name}-refused"))
    try:
        assert refused.wait() != 0
        last = refused.output().rstrip().rpartition("\n")[2]
        assert re.search(expected, last), refused.output()[-3000:]
    finally:
        refused.container.remove(force=True)
