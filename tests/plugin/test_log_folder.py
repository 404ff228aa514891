"""torch names a log folder after the job, and makes it when the other nodes have stopped their
workers to take this one in: what cannot be made is found before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from rdzv_etcd.errors import SettingsError
from tests.plugin.handlers import parameters
from tests.support.processes import free_port


class OwnLogs(DefaultLogsSpecs):
    """A program's own logs, which may be named otherwise."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        raise NotImplementedError


def launch(job_id: str, logs: DefaultLogsSpecs) -> None:
    """A launch of torch's that finds no etcd."""
    params = parameters(f"127.0.0.1:{free_port()}", job_id, "1", connect_timeout=1)
    config = LaunchConfig(
        1, 1, 1,
        logs_specs=logs, run_id=job_id, rdzv_backend="etcd3",
        rdzv_endpoint=params.endpoint, rdzv_configs={"connect_timeout": "1"},
    )  # fmt: skip
    launch_agent(config, "true", [])


@pytest.mark.parametrize(
    ("job_id", "cure"),
    [
        ("team/job", "without '/'"),
        ("x" * 250, "give a shorter --rdzv-id"),
        ("é" * 130, "give a shorter --rdzv-id"),
    ],
    ids=["slash", "long", "long in bytes"],
)
def test_a_job_id_that_cannot_name_a_folder_is_refused(
    job_id: str, cure: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="torch cannot create its log folder") as caught:
        launch(job_id, DefaultLogsSpecs(str(tmp_path)))
    assert cure in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_which_nothing_can_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give another --log-dir"):
        launch("job", DefaultLogsSpecs("/proc/self"))


@pytest.mark.parametrize(
    ("job_id", "logs"),
    [
        ("x" * 240, DefaultLogsSpecs),
        ("team/job", OwnLogs),
        ("team/job", lambda _: DefaultLogsSpecs(os.devnull)),
    ],
    ids=["long enough", "own logs", "no logs"],
)
def test_what_torch_can_name_is_not_refused(job_id: str, logs: type, tmp_path: Path) -> None:
    with pytest.raises(RendezvousConnectionError):
        launch(job_id, logs(str(tmp_path)))
    assert not list(tmp_path.iterdir())
