"""Training through real torchrun on an etcd that demands much and gives little.

One job on one server, with mutual TLS, users whose tokens live two seconds, and a small quota; the
workers' step log judges.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.servers import fill, make_room
from tests.support.certificates import Certificates
from tests.support.gateway import GatewayError
from tests.support.servers import ROOT_PASSWORD, USER, USER_PASSWORD, EtcdBinary, EtcdServer
from tests.torchrun.agents import QUICK, Job
from tests.torchrun.training import TTL_S, Training

pytestmark = [pytest.mark.torchrun, pytest.mark.release]
"""CI sees the same of nodes without torchrun: test_nospace.py, test_server.py, tests/etcd."""

_TOKEN_S = 2
_QUOTA = 4 * 1024 * 1024
_CURE = "etcdctl alarm disarm"
_LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}


@pytest.fixture(scope="module")
def strict_etcd(
    etcd_binary: EtcdBinary,
    certificates: Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EtcdServer]:
    """The user ``trainer`` may touch ``/rdzv_etcd/`` and nothing else."""
    flags = ("--auth-token-ttl", str(_TOKEN_S), "--quota-backend-bytes", str(_QUOTA))
    server = EtcdServer(
        etcd_binary,
        tmp_path_factory.mktemp("etcd"),
        certificates=certificates,
        require_client_cert=True,
        flags=flags,
    )
    try:
        server.start_on_free_ports().enable_auth(b"/rdzv_etcd/")
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def shared_training(
    strict_etcd: EtcdServer,
    certificates: Certificates,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Training]:
    files = certificates
    tls = f"ca_cert={files.ca},cert={files.client_cert},key={files.client_key}"
    folder = tmp_path_factory.mktemp("job")
    job = Job(strict_etcd.endpoint, folder, nnodes="2:3", conf=f"{QUICK},{tls}", allreduce=True)
    made = Training(job, lambda: strict_etcd.gateway)
    try:
        made.start("a", "b", **_LOGIN)
        yield made
    finally:
        made.close()


def test_tls_client_certificates_and_a_role_limited_to_the_prefix(
    strict_etcd: EtcdServer, training: Training
) -> None:
    """A world forms, and takes in another node; its user may really touch nothing else."""
    with training.reformed_once():
        training.start("c", **_LOGIN)
    gateway = strict_etcd.gateway
    gateway.log_in_as(USER, USER_PASSWORD)
    try:
        with pytest.raises(GatewayError, match="permission denied"):
            gateway.put(b"/somebody/else", b"")
    finally:
        gateway.log_in_as("root", ROOT_PASSWORD)


def test_tokens_expire_every_two_seconds(strict_etcd: EtcdServer, training: Training) -> None:
    """Several times; and the list of users is changed meanwhile, which ends every token at once."""
    with training.undisturbed():
        training.train_for(2.5 * _TOKEN_S)
        strict_etcd.gateway.call("/v3/auth/user/add", {"name": "somebody", "password": "else"})
        training.train_for(2.5 * _TOKEN_S)
        training.wait_present()


def test_etcd_is_out_of_space(strict_etcd: EtcdServer, training: Training) -> None:
    """NOSPACE alarm: training continues for several TTLs, and after it is cleared."""
    with training.undisturbed():
        fill(strict_etcd.gateway)
        training.train_for(3 * TTL_S)
        make_room(strict_etcd.gateway)
        training.wait_present()


def test_a_node_is_killed_while_etcd_is_out_of_space(
    strict_etcd: EtcdServer, training: Training
) -> None:
    """The others wait for the operator, and form one new world when there is space again."""
    fill(strict_etcd.gateway)
    victim, *others = training.members
    before = {agent.name: len(agent.output) for agent in others}
    with training.reformed_once():
        victim.kill()
        training.wait_until(
            "the others log what they wait for",
            lambda: all(_CURE in agent.output[before[agent.name] :] for agent in others),
        )
        make_room(strict_etcd.gateway)
    training.finish()
