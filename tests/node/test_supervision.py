"""A background task that fails unexpectedly fails its node: at once, loudly, with the cause.

The defect is a connection that raises what no connection may raise.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rdzv_etcd.errors import TaskFailedError
from rdzv_etcd.etcd.port import Get, Txn
from rdzv_etcd.testing.model import RenewLease, Request
from rdzv_etcd.world.collectives import Collectives
from tests.sim.world import TTL_S, SimJob, SimNode, simulate, simulated

SEEDS = range(5)


class Defect(Exception):
    """What nobody expects."""


DEFECT: Any = Defect("something nobody thought of")


def errors_of(caplog: pytest.LogCaptureFixture, node: SimNode) -> list[logging.LogRecord]:
    return [
        record
        for record in caplog.records
        if record.levelno == logging.ERROR and f" {node.name}: " in record.getMessage()
    ]


def keep_alive(job: SimJob, request: Request) -> bool:
    """Of a session; other leases are renewed by other tasks."""
    sessions = {kv.lease_id for kv in job.server.snapshot() if kv.key in job.keys.nodes}
    return isinstance(request, RenewLease) and request.lease_id in sessions


def publishing(job: SimJob, request: Request) -> bool:
    return isinstance(request, Txn) and any(put.key == job.keys.change for put in request.puts())


def reading_nodes(job: SimJob, request: Request) -> bool:
    return (
        isinstance(request, Get)
        and request.key == job.keys.nodes.start
        and not request.newest_first
    )


@pytest.mark.parametrize(
    ("where", "task"),
    [(keep_alive, "session"), (publishing, "leadership")],
    ids=["keep-alive", "publishing"],
)
@simulated(SEEDS, min_nodes=1, max_nodes=3)
async def test_a_task_that_fails_unexpectedly_ends_its_nodes_part_with_the_cause(
    job: SimJob, where: Any, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    await job.all_work("abc")
    node = job.leader
    node.connection.link.fail(DEFECT, 1, lambda request: where(job, request))
    if task == "leadership":
        job.crash(job.followers()[0].name)  # so that it has something to publish
    others = [each for each in job.nodes.values() if each is not node and each.alive]
    await job.until(lambda: node.error is not None, "it is told", 2 * TTL_S)
    assert isinstance(node.error, TaskFailedError)
    assert node.error.task == task
    assert "something nobody thought of" in str(node.error)
    assert node.error.__cause__ is DEFECT
    assert node.node.waiting_count() > 0
    (told,) = errors_of(caplog, node)
    assert "something nobody thought of" in told.getMessage()
    assert told.exc_info is not None
    with pytest.raises(TaskFailedError):
        await job.on(node, node.join())
    await job.leave(node.name)  # as torch's agent does after such an error
    await job.until_works([each.name for each in others], TTL_S + 5)
    assert len(errors_of(caplog, node)) == 1


@simulated(SEEDS, min_nodes=2, max_nodes=2)
async def test_a_join_that_waits_hears_of_the_failure_of_the_task_it_waits_for(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    node = job.make("a")
    # The leader's view of the nodes: read once to begin with, and again when a watch is lost.
    node.connection.link.fail(DEFECT, 1, lambda request: reading_nodes(job, request))
    node.agent = job.on(node, node.run())
    await job.until(lambda: node.error is not None, "it is told", 1.0)
    assert isinstance(node.error, TaskFailedError)
    assert node.error.task == "leadership"
    await job.leave("a")
    assert not job.server.leases()  # it has taken its presence back


@simulated(SEEDS, min_nodes=2, max_nodes=2)
async def test_a_join_hears_of_the_failure_of_what_tells_about_it(job: SimJob) -> None:
    node = job.make("a")
    node.agent = job.on(node, node.run())
    await job.pass_time(5.0)  # its leadership has read who is there
    node.connection.link.fail(DEFECT, 1, lambda request: reading_nodes(job, request))
    await job.until(lambda: node.error is not None, "it is told", 20.0)
    assert isinstance(node.error, TaskFailedError)
    assert node.error.task == "wait lines"
    await job.leave("a")


@simulated(SEEDS, min_nodes=2, max_nodes=2)
async def test_a_barrier_hears_of_the_failure(job: SimJob) -> None:
    nodes = [job.make(name) for name in "ab"]
    worlds = await asyncio.gather(*(job.on(node, node.join()) for node in nodes))
    node = nodes[0]
    node.connection.link.fail(DEFECT, 1, lambda request: keep_alive(job, request))
    waiting = job.on(node, Collectives(node.node, worlds[0]).barrier("here", 300.0))
    with pytest.raises(TaskFailedError, match="session"):
        await waiting
    with pytest.raises(TaskFailedError, match="session"):
        await job.on(node, node.node.changed())
    for each in nodes:
        await job.leave(each.name)


def test_tasks_that_are_cancelled_are_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(job: SimJob) -> None:
        await job.all_work("abc")
        for name in "abc":
            await job.leave(name)

    simulate(scenario, SEEDS, min_nodes=3, max_nodes=3)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
