"""No node waits in silence, and none is noisy about it. In virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rdzv_etcd.errors import BarrierTimeoutError, JobSettingsMismatchError, StoreTimeoutError
from rdzv_etcd.etcd.port import Delete, Txn
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.node.context import REFUSED_TTL_S
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world.collectives import Collectives
from rdzv_etcd.world.world_over import unless_over
from tests.node.test_refusals import warnings_of
from tests.sim.commits import OPERATOR
from tests.sim.matching import noted
from tests.sim.world import TIMING, TTL_S, SimJob, simulated


def said(caplog: pytest.LogCaptureFixture, job: SimJob, name: str) -> list[str]:
    return [line for line in warnings_of(caplog, job.nodes[name]) if ": waiting " in line]


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_every_node_says_what_it_waits_for_after_ten_seconds_and_then_rarely(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    job.start_all("ab", join_timeout_s=2000.0)
    await job.pass_time(9.5)
    assert said(caplog, job, "a") == []
    await job.pass_time(1.0)
    for name in "ab":
        (line,) = said(caplog, job, name)
        assert "waiting 10 s for round 1: 2 of 3 nodes here: " in line
    await job.pass_time(1000.0)
    assert [len(said(caplog, job, name)) for name in "ab"] == [6, 6]


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_who_waits_is_told_at_once_of_one_that_other_settings_keep_out(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    job.start_all("ab", join_timeout_s=2000.0)
    await job.pass_time(70.0)
    caplog.clear()
    others = [job.start(name, job=JobSettings(2, 2)) for name in "xy"]
    await job.pass_time(1.0)
    for name in "ab":
        (line,) = said(caplog, job, name)
        assert "2 of 3 nodes here: " in line
        assert " cannot join: it was started with min_nodes=2, max_nodes=2; start all" in line
        assert "are the others started" not in line
    puts = [kv for kv in job.server.snapshot() if kv.key == job.keys.refused]
    assert [kv.lease_id != 0 for kv in puts] == [True]
    await job.until(lambda: all(it.error for it in others), "they are refused", 20.0)
    caplog.clear()
    job.start("x2", job=JobSettings(2, 2))
    await job.pass_time(10.0)
    assert said(caplog, job, "a") == []  # it was said
    job.start("z")
    await job.until_works("abz", 30.0)
    await job.pass_time(REFUSED_TTL_S)
    assert job.keys.refused not in {kv.key for kv in job.server.snapshot()}


@pytest.mark.parametrize("what", ["barrier", "exchange", "store", "store, even if over"])
@simulated(range(2), min_nodes=2, max_nodes=2)
async def test_who_waits_for_other_members_says_so(
    job: SimJob, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    await job.all_work("ab")
    one = job.nodes["a"]
    assert one.world is not None
    node, seat = one.node, one.world
    keys = node.context.keys.store(seat.round, seat.run)
    store = KeyValueStore(
        one.connection, keys, seat.job_lease, writer="a", clock=node.context.clock
    )
    waits: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "barrier": lambda: Collectives(node, seat).barrier("saved", 100.0),
        "exchange": lambda: Collectives(node, seat).exchange(b"", 100.0),
        "store": lambda: unless_over(node, seat, "key", lambda: store.get("key", 100.0)),
        "store, even if over": lambda: unless_over(
            node, seat, "key", lambda: store.get("key", 100.0), even_if_over=True
        ),
    }
    caplog.clear()
    with pytest.raises((BarrierTimeoutError, StoreTimeoutError)):
        await job.on(one, waits[what]())
    seconds = [line.split(": waiting ")[1].split(" s for ")[0] for line in said(caplog, job, "a")]
    assert seconds == ["10", "30", "60"]


@simulated(range(2), min_nodes=1, max_nodes=2)
async def test_a_member_that_has_finished_says_that_it_waits_for_the_others(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    await job.all_work("ab")
    await job.finish_early("a")
    await job.pass_time(2.0)
    caplog.clear()
    one, (world,) = job.nodes["a"], job.nodes["a"].worlds
    waits = unless_over(one.node, world, "key", one.node.closed, even_if_over=True)
    waiting = job.on(one, waits)
    await job.pass_time(11.0)
    assert said(caplog, job, "a") == [
        "[job] a: waiting 10 s for the others to finish: its own work is done"
    ]
    waiting.cancel()


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_spare_asks_whether_it_is_another_job_with_the_same_id(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    await job.all_work("ab")
    job.start("s")
    caplog.clear()
    await job.pass_time(11.0)
    (line,) = said(caplog, job, "s")
    assert "10 s for a seat: job 'job' runs with 2 nodes, its maximum; is another job" in line


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_wait_for_etcd_is_told(job: SimJob, caplog: pytest.LogCaptureFixture) -> None:
    node = job.start("a")
    await job.until(lambda: node.node.leads, "it has arrived")
    caplog.clear()
    job.server.stop()
    await job.pass_time(40.0)
    assert any(" for etcd: " in line for line in said(caplog, job, "a"))
    job.server.start()


# --- the settings of a dead job -------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, TTL_S + 2.0])
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_dead_jobs_settings_refuse_no_new_start(
    job: SimJob, after_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its leases live on or not: nobody is there."""
    await job.all_work("ab")
    job.crash("a", "b")
    await job.pass_time(after_s)
    caplog.clear()
    job.start_all("xyz", job=JobSettings(3, 3))
    await job.pass_time(1.0)
    for name in "xyz":
        (line,) = warnings_of(caplog, job.nodes[name])
        assert "started with min_nodes=3, max_nodes=3" in line
        assert "min_nodes=2, max_nodes=2" in line
    await job.until_works("xyz", TIMING.job_ttl_s + TTL_S + 10.0)


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_the_end_of_what_a_dead_job_left_is_not_missed(job: SimJob) -> None:
    """It comes just while the new node looks whether anybody of that job is there."""
    await job.all_work("ab")
    job.crash("a", "b")
    await job.pass_time(TTL_S + 2.0)
    new = job.make("x", job=JobSettings(1, 1))
    looking, under_way = noted(lambda request: request == job.keys.nodes.read(limit=2))
    new.connection.link.hold_requests(2.0, 1, looking)
    new.agent = job.on(new, new.run())
    await job.until(lambda: bool(under_way), "it looks", 5.0)
    job.server.apply(Txn((), (Delete(job.keys.round),)), OPERATOR)
    await job.until_works("x", TTL_S)


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_living_jobs_settings_refuse_a_node_after_a_ttl(job: SimJob) -> None:
    await job.all_work("ab")
    stranger = job.start("x", job=JobSettings(3, 3))
    took_s = await job.until(lambda: stranger.error is not None, "it is refused", 20.0)
    assert isinstance(stranger.error, JobSettingsMismatchError)
    assert took_s < TTL_S + 3.0
    assert job.works("ab")
