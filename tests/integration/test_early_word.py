"""Nodes that die or fall silent are known by the links between nodes, before their leases end.

For a release: CI has seen it on hosts that are network namespaces (tests/torchrun/test_deaths.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rdzv_etcd.world_change import HOST_SILENT, PROCESS_EXITED
from tests.integration.containers import Host, Project, wait_until
from tests.integration.test_node_faults import Fault, lose_and_regain

pytestmark = pytest.mark.release

_TTL_S = 20
"""Only a node that has been there for a TTL itself is believed that a host is silent."""
_CONF = f"lease_ttl={_TTL_S},last_call_timeout=3,closed_ttl=3,ended_ttl=3"
_KILL = """
import os, signal
def is_torchrun(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"torchrun" in command.read()
pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {1, os.getpid()}
os.kill(min(filter(is_torchrun, pids)), signal.SIGKILL)
"""


@contextmanager
def agent_killed(host: Host) -> Iterator[None]:
    """As by the kernel, out of memory: the agent alone. Its container ends with it."""
    host.run("python3", "-c", _KILL)
    host.wait()
    yield
    host.container.start()


@pytest.fixture(scope="module")
def patient(project: Callable[..., Project]) -> Project:
    """Nodes whose leases outlast the tests."""
    return project("node-single", profiles=["single"], NNODES="2:3", RDZV_CONF=_CONF)


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (Host.killed, (PROCESS_EXITED, HOST_SILENT)),
        (agent_killed, (PROCESS_EXITED, HOST_SILENT)),
        (Host.disconnected, (HOST_SILENT,)),
    ],
)
def test_a_loss_is_known_though_its_lease_lives(
    patient: Project, fault: Fault, reported: tuple[str, ...]
) -> None:
    for host in patient.all_hosts():
        host.heal()
    trio = patient.scale("node-single", 3)
    world = patient.wait_for_world(trio)
    trusted_at = time.time() + _TTL_S
    wait_until(
        "a TTL of training",
        lambda: all(host.steps()[-1].time > trusted_at for host in trio),
    )
    trio.sort(key=lambda host: [step.attempt for step in world].index(host.steps()[-1].attempt))
    lose_and_regain(patient, trio, trio[0], fault)
    # A lease that ends is reported as "lease expired".
    survivors = [host.output() for host in trio[1:]]
    assert all(any(how in output for how in reported) for output in survivors), patient.describe()
