"""What workers see of the agent's environment."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import rdzv_etcd
from rdzv_etcd.torch_plugin import environment
from rdzv_etcd.torch_plugin.environment import WorkerEnvironment, full_environment
from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import LIMIT_S, wait_until
from tests.plugin.handlers import QUICK, PluginJob, handlers, leave, parameters, run_program
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
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str
) -> None:
    """And the process has it again when the launch is over."""
    login = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
    done = run_program(_PROGRAM, auth_etcd.endpoint, job_id, **login)
    assert done.stdout == f"{[None, USER]} {USER_PASSWORD}\n", done.stderr


def test_the_agent_itself_goes_on_with_the_password(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
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
    assert "RDZV_ETCD_PASSWORD" not in os.environ  # the first may start workers again
    assert first.shutdown()
    assert os.environ["RDZV_ETCD_PASSWORD"] == USER_PASSWORD


def test_an_epoch_is_for_the_workers_and_not_for_the_next_job_of_the_process(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's environment is as it was when a launch is over: with what its user gave."""
    monkeypatch.setenv("RDZV_ETCD_EPOCH", "4000000")
    first = job.handler()
    first.next_rendezvous()
    epoch = int(os.environ["RDZV_ETCD_EPOCH"])
    assert epoch > 4_000_000
    second = create_handler(parameters(job.server, f"{job.id}-2", "1"))
    assert second._settings.epoch_floor == 4_000_000
    assert first.shutdown()
    assert os.environ["RDZV_ETCD_EPOCH"] == "4000000"
    second.next_rendezvous()
    os.environ["RDZV_ETCD_EPOCH"] = "7"
    assert second.shutdown()
    assert os.environ["RDZV_ETCD_EPOCH"] == "7"


def test_two_launches_in_one_process_start_their_workers_with_what_is_theirs(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks for the run id just before it starts a worker."""
    monkeypatch.delenv("RDZV_ETCD_EPOCH", raising=False)
    with job.handlers(1) as (first,), handlers(job.server, f"{job.id}-2", "1", 1) as (second,):
        found = {}
        for handler in (first, second):
            handler.next_rendezvous()
            found[handler] = os.environ["RDZV_ETCD_EPOCH"], os.environ["RDZV_ETCD_NODE_ID"]
        assert found[first][1] != found[second][1]
        for handler in (first, second, first):
            handler.get_run_id()
            now = os.environ["RDZV_ETCD_EPOCH"], os.environ["RDZV_ETCD_NODE_ID"]
            assert now == found[handler]
        leave(first)
        first.get_run_id()
        assert os.environ["RDZV_ETCD_NODE_ID"] == found[second][1]
    assert "RDZV_ETCD_EPOCH" not in os.environ
    assert "RDZV_ETCD_NODE_ID" not in os.environ


def test_what_an_interrupted_launch_took_is_given_back_when_its_node_leaves(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch does not call ``shutdown()`` then; the next cell of the notebook uses the library."""
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)
    monkeypatch.delenv("RDZV_ETCD_EPOCH", raising=False)
    handler = create_handler(parameters(auth_etcd, job_id, "1"))
    handler.next_rendezvous()
    rdzv_etcd.leave_all(job_id)
    assert os.environ["RDZV_ETCD_PASSWORD"] == USER_PASSWORD
    assert "RDZV_ETCD_EPOCH" not in os.environ
    options = {**QUICK, "closed_ttl": 5, "ended_ttl": 5, "allow_plain_password": True}
    with rdzv_etcd.connect(
        auth_etcd.endpoint,
        job=f"{job_id}-2",
        nodes=1,
        **options,  # type: ignore[arg-type]
    ) as group:
        assert group.join().size == 1
    assert handler.get_run_id() == job_id
    assert "RDZV_ETCD_EPOCH" not in os.environ


def test_workers_inherit_no_secret_of_an_embedded_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", "staple-battery-horse")
    one = WorkerEnvironment()
    one.prepare(8, "one")
    assert "RDZV_ETCD_EMBED_SECRET" not in os.environ
    assert full_environment()["RDZV_ETCD_EMBED_SECRET"] == "staple-battery-horse"
    one.give_back()
    assert os.environ["RDZV_ETCD_EMBED_SECRET"] == "staple-battery-horse"


def test_many_threads_lose_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "sesame")
    monkeypatch.setenv("RDZV_ETCD_EPOCH", "7")
    monkeypatch.delenv("RDZV_ETCD_NODE_ID", raising=False)

    def launch(number: int) -> None:
        one = WorkerEnvironment()
        for epoch in range(8, 58):
            one.prepare(epoch, f"node-{number}")
            one.put_again()
            given = full_environment()
            assert (given["RDZV_ETCD_PASSWORD"], given["RDZV_ETCD_EPOCH"]) == ("sesame", "7")
            assert "RDZV_ETCD_NODE_ID" not in given
            one.give_back()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(launch, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert os.environ["RDZV_ETCD_PASSWORD"] == "sesame"
    assert os.environ["RDZV_ETCD_EPOCH"] == "7"
    assert "RDZV_ETCD_NODE_ID" not in os.environ


def test_it_is_given_back_without_waiting_for_who_waits_for_this_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's handler that shuts down interrupts the main thread in the midst of a change."""
    monkeypatch.setenv("RDZV_ETCD_EPOCH", "7")
    one = WorkerEnvironment()
    one.prepare(8, "one")
    with environment._lock, ThreadPoolExecutor(1) as pool:
        pool.submit(one.begin_to_give_back).result(LIMIT_S)
    wait_until("it is given back", lambda: os.environ["RDZV_ETCD_EPOCH"] == "7")


def test_a_forked_child_waits_for_no_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ETCD_EPOCH", "7")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with environment._lock:
            held.set()
            done.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert held.wait(LIMIT_S)
        child = os.fork()
        if child == 0:
            os._exit(0 if full_environment()["RDZV_ETCD_EPOCH"] == "7" else 1)
        _, status = os.waitpid(child, 0)
        done.set()
    assert status == 0


_FORK_SERVER = """
import multiprocessing, sys
from rdzv_etcd.torch_plugin.handler import create_handler
from tests.plugin.handlers import leave, parameters

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    worker = context.Process(target=print, args=("worked",))
    worker.start()
    worker.join()
    handler = create_handler(parameters(sys.argv[1], sys.argv[2], "1"))
    handler.next_rendezvous()
    leave(handler)
"""


@pytest.mark.slow
def test_a_fork_server_that_runs_gets_a_warning(job: PluginJob) -> None:
    """It gives workers the environment of its own start, whatever round they are of."""
    done = run_program(_FORK_SERVER, job.server.endpoint, job.id)
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr
    assert done.stderr.count("Use --start-method=spawn") == 1, done.stderr
