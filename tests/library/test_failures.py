"""What fails on the library's thread: one node's task, or the thread itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from rdzv_etcd import Failed
from rdzv_etcd.errors import TaskFailedError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.world.group import Group
from tests.library.nodes import LIMIT_S, Job, node_options, node_settings
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_task_that_would_end_a_program_fails_its_own_node_and_no_other(
    job: Job, caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    class Rude(EtcdClient):
        async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> int:
            if has_joined.is_set():
                raise raised("what the connection does")
            return await super().keep_alive(lease_id, timeout_s=timeout_s)

    has_joined = threading.Event()
    other_job = f"{job.id}-other"
    job.leaks.watch_job(job.server.gateway, other_job)
    settings = job.settings()
    with (
        Group(node_settings(job.server, other_job, "1")) as other,
        Group(settings, connect=lambda: Rude(settings.connection)) as group,
    ):
        others_world = other.join()
        world = group.join()
        has_joined.set()
        assert world.wait_over(LIMIT_S)
        with pytest.raises(TaskFailedError, match="what the connection does") as caught:
            group.join()
        assert isinstance(caught.value.__cause__, raised)
        assert isinstance(world.change, Failed)
        assert "was raised on the library's own thread" in caplog.text
        others_world.barrier("goes on", timeout_s=LIMIT_S)
        assert not others_world.over


FAILING_THREAD = """
import asyncio, json, logging, os, sys, threading
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.observer import Observer
from rdzv_etcd.settings.parse import settings_from_config

logging.basicConfig(format="%(levelname)s %(message)s")
settings = settings_from_config(environ={}, **json.loads(sys.argv[1]))
other_settings = settings_from_config(environ={}, **json.loads(sys.argv[2]))
group = Group(settings)
world = group.join()
observer = Observer(settings)
group.when_left(lambda: print("told that it has left"))

def attempt(name, call):
    try:
        print(name, call())
    except Exception as error:
        print(name, type(error).__name__, type(error.__cause__).__name__)

async def break_it():
    os.close(asyncio.get_running_loop()._selector.fileno())

waiting = threading.Thread(target=attempt, args=("wait_over", world.wait_over))
waiting.start()
group._part.begin(break_it())
waiting.join()
print(world.over, type(world.change).__name__, world.should_yield, group.waiting_count())
attempt("join", group.join)
attempt("barrier", lambda: world.barrier("there"))
attempt("state", observer.state)
with Group(other_settings) as another:
    print(another.join().size)
    group.leave()
    observer.close()
"""


def test_a_thread_that_fails_fails_every_node_and_the_next_node_gets_another(
    leak_check: LeakCheck, fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    """Its leases run out, after this test and with its etcd."""
    server = fresh_etcd()
    jobs = (job_id, f"{job_id}-other")
    options = [json.dumps(node_options(server, each, "1")) for each in jobs]
    process = subprocess.run(
        [sys.executable, "-c", FAILING_THREAD, *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "wait_over True",
        "True Failed True 1",
        "join TaskFailedError OSError",
        "barrier TaskFailedError OSError",
        "state TaskFailedError OSError",
        "1",
        "told that it has left",
    ]
    assert process.stderr.count("ERROR the library's own thread 'rdzv-etcd' has failed") == 1
    assert process.stderr.count("this node cannot continue: its task 'event loop' failed") == 1
