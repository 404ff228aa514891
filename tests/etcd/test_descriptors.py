"""A process that may not open enough files fails at once with that reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdzv_etcd.etcd import grpc_start
from tests.etcd.tools import python
from tests.support.servers import EtcdServer

START = """
import resource, sys
from rdzv_etcd.world.group import Group
from rdzv_etcd.settings import settings_from_config
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
settings = settings_from_config(
    endpoint=sys.argv[2], job_id=sys.argv[3], min_nodes=1, max_nodes=1, local_addr=None,
    config={"connect_timeout": 600, "last_call_timeout": 0.1}, environ={},
)
with Group(settings) as group:
    assert group.join(60).size == 1
"""


@pytest.mark.parametrize("limit", [10, 13, 24])
def test_too_few_descriptors_are_reported_at_once(
    etcd_server: EtcdServer, job_id: str, limit: int
) -> None:
    """Within the time of a hang, not within ``connect_timeout``."""
    done = python(START, str(limit), etcd_server.target, job_id)
    assert done.returncode == 1, done
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert "EtcdError: too many open files" in last
    assert last.endswith("raise ulimit -n")


def test_few_descriptors_are_enough(etcd_server: EtcdServer, job_id: str) -> None:
    done = python(START, "40", etcd_server.target, job_id)
    assert done.returncode == 0, done.stderr


def test_asking_gives_all_back() -> None:
    def used() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = used()
    grpc_start.require_free()
    assert used() == before
