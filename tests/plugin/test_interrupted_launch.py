"""torch's ``elastic_launch`` in a process that lives on, as a notebook's does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.library.nodes import wait_until
from tests.plugin.handlers import PluginJob, run_program

_PROGRAM = """
import os, signal, sys, threading
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(forever):
    if forever:
        os.kill(os.getppid(), signal.SIGTERM)
        threading.Event().wait()
    return "done"

def launch(forever, job=sys.argv[2]):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, run_id=job, rdzv_backend="etcd3",
        rdzv_endpoint=sys.argv[1], local_addr="127.0.0.1", monitor_interval=0.1,
        rdzv_configs={"lease_ttl": 600, "timeout": 60, "closed_ttl": 5, "ended_ttl": 5},
        start_method="spawn",
    )
    return elastic_launch(config, work)(forever)

if __name__ == "__main__":
    try:
        launch(True)
    except SignalException as error:
        kept = error if sys.argv[3] != "dropped" else None
    if sys.argv[3] == "kept, then in a thread":
        again = threading.Thread(target=lambda: print(launch(False)))
        again.start()
        again.join()
    elif sys.argv[3] == "kept, then of another job":
        print(launch(False, sys.argv[2] + "-2"))
        assert "RDZV_ETCD_EPOCH" not in os.environ
    else:
        print(launch(False))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "traceback", ["kept", "dropped", "kept, then in a thread", "kept, then of another job"]
)
def test_after_an_interrupted_launch_another_one_can_be_run(job: PluginJob, traceback: str) -> None:
    """torch does not shut the handler down, and a kept traceback keeps the handler."""
    done = run_program(_PROGRAM, job.server.endpoint, job.id, traceback)
    assert (done.returncode, done.stdout) == (0, "{0: 'done'}\n"), done.stderr
    assert ("was interrupted: its node" in done.stderr) == (traceback != "dropped"), done.stderr
    assert not job.keys(b"nodes/")


_SPARE = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=1, run_id=sys.argv[2], rdzv_backend="etcd3",
    rdzv_endpoint=sys.argv[1], local_addr="127.0.0.1", monitor_interval=0.1,
    rdzv_configs={"timeout": 60, "closed_ttl": 3},
)
try:
    elastic_launch(config, "true")()
except RendezvousGracefulExitError as error:
    if sys.argv[3] == "nothing":
        raise
    print("told:", error)
print("goes on")
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_to_do", ["more", "nothing"])
def test_a_program_whose_launch_was_a_spare_goes_on_or_ends_well(
    job: PluginJob, has_to_do: str
) -> None:
    """Whether or not it catches the error."""
    with job.handlers(1) as (member,), ThreadPoolExecutor(1) as pool:
        member.next_rendezvous()
        spare = pool.submit(run_program, _SPARE, job.server.endpoint, job.id, has_to_do)
        nodes = job.root + b"nodes/"
        wait_until("the spare's arrival", lambda: len(job.server.keys(nodes)) == 2)
        assert member.shutdown()
        done = spare.result()
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    if has_to_do == "nothing":
        assert printed == ""
        return
    assert printed.startswith("told: ")
    assert "the workers have finished" in printed
    assert printed.endswith("goes on\n")
