"""torch's ``elastic_launch`` in a process that lives on, as a notebook's does."""

from __future__ import annotations

import pytest

from tests.plugin.handlers import PluginJob, run_program

_PROGRAM = """
import os, sys, threading
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def launch(command, job=sys.argv[2]):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, run_id=job, rdzv_backend="etcd3",
        rdzv_endpoint=sys.argv[1], local_addr="127.0.0.1", monitor_interval=0.1,
        rdzv_configs={"lease_ttl": 600, "timeout": 60, "closed_ttl": 5, "ended_ttl": 5},
    )
    elastic_launch(config, "sh")("-c", command)
    print(command, "is done")

for then in ("here", "here, without the traceback", "in a thread", "of another job"):
    try:
        launch("kill -TERM $PPID")
    except SignalException as error:
        kept = error if "without" not in then else None
    print("then", then, file=sys.stderr)
    if then == "in a thread":
        again = threading.Thread(target=launch, args=("true",))
        again.start()
        again.join()
    elif then == "of another job":
        launch("true", sys.argv[2] + "-2")
        assert "RDZV_ETCD_EPOCH" not in os.environ
    else:
        launch("true")
"""


@pytest.mark.slow
def test_after_an_interrupted_launch_another_one_can_be_run(job: PluginJob) -> None:
    """torch does not shut the handler down, and a kept traceback keeps the handler."""
    done = run_program(_PROGRAM, job.server.endpoint, job.id)
    assert (done.returncode, done.stdout) == (0, 4 * "true is done\n"), done.stderr
    _, *launches = done.stderr.split("\nthen ")
    found = ["was interrupted: its node" in each for each in launches]
    assert found == [True, False, True, True], done.stderr
    assert not job.keys(b"nodes/")
