"""What workers see of the agent's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import LIMIT_S
from tests.plugin.handlers import parameters
from tests.support.leaks import LeakCheck
from tests.support.servers import USER, USER_PASSWORD, EtcdServer

_PROGRAM = """
import os, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work():
    return [os.environ.get(name) for name in ("RDZV_ETCD_PASSWORD", "RDZV_ETCD_USER")]

if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, run_id=sys.argv[2], rdzv_backend="etcd3",
        rdzv_endpoint=sys.argv[1], local_addr="127.0.0.1", monitor_interval=0.1,
        rdzv_configs={"timeout": 60, "closed_ttl": 3}, start_method="spawn",
    )
    print(elastic_launch(config, work)()[0], os.environ["RDZV_ETCD_PASSWORD"])
"""


@pytest.mark.slow
def test_workers_do_not_inherit_the_password(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    """And the process has it again when the launch is over."""
    program = tmp_path / "launch.py"
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, program, auth_etcd.endpoint, job_id],
        env={**os.environ, "RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD},
        check=False,
        capture_output=True,
        text=True,
        timeout=10 * LIMIT_S,
    )
    assert done.stdout == f"{[None, USER]} {USER_PASSWORD}\n", done.stderr


def test_the_agent_itself_goes_on_with_the_password(
    leak_check: LeakCheck,
    auth_etcd: EtcdServer,
    job_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a next round, beyond a token's life, and with a handler made while it is withheld."""
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)
    first = create_handler(parameters(auth_etcd, job_id, "1"))
    first.next_rendezvous()
    assert "RDZV_ETCD_PASSWORD" not in os.environ
    second = create_handler(parameters(auth_etcd, f"{job_id}-2", "1"))
    assert second.next_rendezvous().world_size == 1
    assert first.next_rendezvous().world_size == 1
    assert second.shutdown()
    assert os.environ["RDZV_ETCD_PASSWORD"] == USER_PASSWORD
    assert first.shutdown()


def test_an_epoch_is_for_the_workers_and_not_for_the_next_job_of_the_process(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's environment is as it was when a launch is over: with what its user gave."""
    monkeypatch.setenv("RDZV_ETCD_EPOCH", "4000000")
    first = create_handler(parameters(etcd_server, job_id, "1"))
    first.next_rendezvous()
    epoch = int(os.environ["RDZV_ETCD_EPOCH"])
    assert epoch > 4_000_000
    second = create_handler(parameters(etcd_server, f"{job_id}-2", "1"))
    assert second._settings.epoch_floor == 4_000_000
    assert first.shutdown()
    assert os.environ["RDZV_ETCD_EPOCH"] == "4000000"
    second.next_rendezvous()
    os.environ["RDZV_ETCD_EPOCH"] = "7"
    assert second.shutdown()
    assert os.environ["RDZV_ETCD_EPOCH"] == "7"


def test_no_epoch_is_left_in_the_environment_where_none_was(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RDZV_ETCD_EPOCH", raising=False)
    handler = create_handler(parameters(etcd_server, job_id, "1"))
    handler.next_rendezvous()
    assert int(os.environ["RDZV_ETCD_EPOCH"]) > 0
    assert handler.shutdown()
    assert "RDZV_ETCD_EPOCH" not in os.environ
