"""What a person sees: lines that say what a node waits for and why, and nothing of gRPC's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters

from rdzv_etcd.torch_plugin.handler import create_handler
from tests.plugin.handlers import PluginJob, leave, parameters, run_program
from tests.support.processes import free_port


def test_the_default_id_gets_a_warning(job: PluginJob, caplog: pytest.LogCaptureFixture) -> None:
    """torchrun's default is "none": two users would share a job."""
    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        leave(create_handler(parameters(job.server, "none", "1")))
        assert "--rdzv-id" in caplog.text
        caplog.clear()
        leave(job.handler())
        assert "--rdzv-id" not in caplog.text


def test_options_of_c10d_are_told_to_mean_nothing_here(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"is_host": 1, "store_type": "file"}
    leave(job.handler(**options))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    for option in options:
        assert sum(text.startswith(f"{option}= has no effect here") for text in told) == 1


_SHOWN = """
import sys
from concurrent.futures import ThreadPoolExecutor
from rdzv_etcd import connect
endpoint, job_id = sys.argv[1:]
how = dict(job=job_id, nodes=(1, 2), local_addr="127.0.0.1", last_call_timeout=0.2, closed_ttl=1)
with connect(endpoint, **how) as group, ThreadPoolExecutor(1) as pool:
    world = group.join()
    group.join()  # as if its own worker had failed
    with connect(endpoint, **how) as newcomer:
        joining = pool.submit(newcomer.join)
        while not group.waiting_count():
            pass
        group.join()
        joining.result()
        group.finish("all done")
"""


def test_a_new_world_is_shown_by_default_if_it_follows_a_change(job: PluginJob) -> None:
    done = run_program(_SHOWN, job.server.endpoint, job.id)
    lines = done.stderr.splitlines()
    told = [
        sum(f"round {number} formed in" in line and ": node rank 0 " in line for line in lines)
        for number in (1, 2, 3)
    ]
    assert told == [0, 0, 1], "only a change is a warning"
    assert any(": node rank 0 of 2 (was 0 of 1; " in line and " joined)" in line for line in lines)
    assert all(job.id in line for line in lines), done.stderr


@pytest.mark.parametrize(("conf", "words"), [({"lease_ttl": "x"}, "lease_ttl"), ({}, "refused")])
def test_what_was_wrong_is_said_before_the_traceback(
    job_id: str, conf: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((ValueError, RendezvousError)) as raised:
        create_handler(
            RendezvousParameters(
                "etcd3", f"127.0.0.1:{free_port()}", job_id, 1, 1, connect_timeout="1", **conf
            )
        )
    assert words in str(raised.value)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [words in line for line in told] == [True]
