"""Programs that have chosen another event loop, or other threads, for themselves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import uvloop

from tests.library.nodes import LIMIT_S, Job, wait_until
from tests.library.test_peer_links import watched_by


@pytest.fixture
def uvloop_policy() -> Iterator[None]:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


def test_members_watch_each_other_whatever_event_loop_the_program_has(
    job: Job, uvloop_policy: None, caplog: pytest.LogCaptureFixture
) -> None:
    with job.worlds(3, "1:3", peer_links=True) as (nodes, worlds):
        wait_until("all are watched", lambda: all(watched_by(node) for node in nodes))
        nodes[1].leave("has to go")
        assert all(world.wait_over(LIMIT_S) for world in worlds)
    assert not [record for record in caplog.records if record.name == "asyncio"]


PROGRAM = textwrap.dedent(
    """
    import sys
    {patch}
    import asyncio
    import rdzv_etcd, rdzv_etcd.aio
    from rdzv_etcd.errors import MisuseError

    given = dict(job=sys.argv[2], local_addr="127.0.0.1")
    def blocking():
        with rdzv_etcd.connect(sys.argv[1], nodes=1, **given) as group:
            group.join().barrier("here")
    def awaited():
        asyncio.run(rdzv_etcd.aio.connect(sys.argv[1], nodes=1, **given))
    def observing():
        rdzv_etcd.observe(sys.argv[1], job=given["job"]).close()
    for use in (blocking, {others}):
        try:
            use()
            print("works")
        except MisuseError as error:
            print(error)
    """
)


def run_patched(patch: str, endpoint: str, job_id: str, others: str = "") -> list[str]:
    """Run the library where ``patch`` was called first; return what it printed, a line a use."""
    program = PROGRAM.format(patch=patch, others=others)
    command = [sys.executable, "-c", program, endpoint, job_id]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


GEVENT = "from gevent import monkey; monkey.{call}"
_ADVICE = "patch_all(thread=False, select=False, subprocess=False)"
EVENTLET = "import eventlet; eventlet.monkey_patch({arguments})"


@pytest.mark.parametrize(
    ("patch", "advice"),
    [
        (GEVENT.format(call="patch_all()"), _ADVICE),
        (GEVENT.format(call="patch_all(thread=False)"), _ADVICE),
        (GEVENT.format(call="patch_thread()"), _ADVICE),
        (EVENTLET.format(arguments=""), "eventlet.monkey_patch(thread=False)"),
    ],
)
def test_where_threads_were_replaced_it_says_what_not_to_replace(
    job: Job, patch: str, advice: str
) -> None:
    lines = run_patched(patch, job.server.endpoint, job.id, "awaited, observing")
    assert len(lines) == 3
    assert all(advice in line for line in lines), lines


@pytest.mark.parametrize(
    "patch",
    [
        GEVENT.format(call="patch_all(thread=False, select=False, subprocess=False)"),
        EVENTLET.format(arguments="thread=False"),
        "import gevent, eventlet",
    ],
)
def test_it_works_where_that_advice_was_taken(job: Job, patch: str) -> None:
    assert run_patched(patch, job.server.endpoint, job.id) == ["works"]
