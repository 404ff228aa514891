"""torch's exit barrier: an agent whose workers have finished waits for the others' there. They do
not wait for it, and it waits for nothing that will not come."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.utils import store as store_util

from tests.library.nodes import LIMIT_S, at_once, wait_until
from tests.plugin.handlers import PluginJob, join_all, leave
from tests.plugin.test_shutdown import child_failure, shut_down_after

FOREVER: dict[str, Any] = {"rejoin_timeout": 100_000}
"""Whoever waits for a finished member waits longer than a test."""


def exit_barrier(info: RendezvousInfo, limit_s: float = LIMIT_S) -> None:
    """What torch's agent does when its workers have succeeded (``_exit_barrier``)."""
    store_util.barrier(info.store, info.world_size, _TERMINAL_STATE_SYNC_ID, limit_s)


def finished(job: PluginJob) -> int:
    """How many nodes have told the others that they have finished."""
    presences = job.keys(b"nodes/").values()
    return sum(json.loads(value).get("finished", False) for value in presences)


def test_the_others_form_a_world_without_a_member_that_has_finished(job: PluginJob) -> None:
    """At once when they are back; it waits for them, and ends when the job does."""
    with job.handlers(3, "1:3", **FOREVER) as made, ThreadPoolExecutor(1) as pool:
        infos = join_all(made)
        first = next(one for one in range(3) if infos[one].rank == 0)
        done, others = made[first], [each for each in made if each is not made[first]]
        waiting = pool.submit(exit_barrier, infos[first])
        wait_until("the others know", lambda: finished(job) == 1)
        assert [other.num_nodes_waiting() for other in others] == [0, 0]
        for _ in range(2):
            again = join_all(others)
            assert {info.world_size for info in again} == {2}
            assert {info.rank for info in again} == {0, 1}
        assert not waiting.done()
        at_once([partial(exit_barrier, info) for info in again])
        assert all(at_once([other.shutdown for other in others]))
        waiting.result(LIMIT_S)
        assert done.shutdown()


def test_a_finished_member_that_is_drained_leaves_at_once(job: PluginJob) -> None:
    """It does not close the job, in which the other node still works."""
    with job.handlers(2, "1:2", lease_ttl=600) as (done, working), ThreadPoolExecutor(1) as pool:
        info, _ = join_all([done, working])
        waiting = pool.submit(exit_barrier, info)
        wait_until("the other knows", lambda: finished(job) == 1)
        done._group.drain("maintenance")
        waiting.result(LIMIT_S)
        assert done.shutdown()
        assert len(job.keys(b"nodes/")) == 1
        assert not working.is_closed()
        assert working.next_rendezvous().world_size == 1


def test_a_finished_member_that_left_unasked_does_not_take_the_others_for_finished(
    job: PluginJob,
) -> None:
    with job.handlers(2, "1:2", **FOREVER) as (done, working), ThreadPoolExecutor(1) as pool:
        info, _ = join_all([done, working])
        waiting = pool.submit(exit_barrier, info)
        wait_until("the other knows", lambda: finished(job) == 1)
        done._group.leave("left over")
        with pytest.raises(dist.DistStoreError, match="this node has left the job"):
            waiting.result(LIMIT_S)


def test_a_finished_member_hears_that_the_job_has_failed(job: PluginJob) -> None:
    with job.handlers(2) as (done, failing), ThreadPoolExecutor(2) as pool:
        info, other = join_all([done, failing])
        waiting = pool.submit(exit_barrier, info)
        also = pool.submit(other.store.get, "what nobody sets")
        assert shut_down_after(failing, child_failure())
        waiting.result(LIMIT_S)
        with pytest.raises(dist.DistStoreError, match="what nobody sets"):
            also.result(LIMIT_S)
        assert done.is_closed()
        assert done.shutdown()


def test_whatever_waits_in_the_agents_store_ends_with_the_job(job: PluginJob) -> None:
    with job.handlers(2) as (waits, ends), ThreadPoolExecutor(2) as pool:
        info, _ = join_all([waits, ends])
        waiting: list[Future[object]] = [
            pool.submit(info.store.get, "nobody sets"),
            pool.submit(info.store.wait, ["nobody sets"]),
        ]
        assert shut_down_after(ends, None)
        for each in waiting:
            with pytest.raises(dist.DistStoreError, match="was closed by"):
                each.result(LIMIT_S)


def test_a_finished_member_waits_no_longer_than_torch_wants(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    """In its own world that is an error, as in any store. Once the others are in another one it is
    none, and its end is not the job's."""
    with job.handlers(2, "1:2", **FOREVER) as (done, working):
        info, _ = join_all([done, working])
        with pytest.raises(dist.DistStoreError, match="terminal_state/last_member"):
            exit_barrier(info, 0.5)
        wait_until("the other knows", lambda: finished(job) == 1)
        assert working.next_rendezvous().world_size == 1
        caplog.set_level(logging.WARNING, "rdzv_etcd")
        with store_util.store_timeout(info.store, 0.5):
            info.store.wait([f"{_TERMINAL_STATE_SYNC_ID}/last_member"])
        assert "this agent waits no longer" in caplog.text
        assert not done.shutdown()
        assert not working.is_closed()
        assert working.num_nodes_waiting() == 0
        assert working.shutdown()


def test_who_has_finished_and_joins_again_takes_part_again(job: PluginJob) -> None:
    """torch's agents do not, but a launcher may."""
    with job.handlers(2, **FOREVER) as made, ThreadPoolExecutor(1) as pool:
        info, _ = join_all(made)
        waiting = pool.submit(exit_barrier, info, 3.0)
        wait_until("the other knows", lambda: finished(job) == 1)
        with pytest.raises(dist.DistStoreError):
            waiting.result(LIMIT_S)
        assert {again.world_size for again in join_all(made)} == {2}
        assert finished(job) == 0
        for handler in made:
            leave(handler)


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_a_loss_of_the_store_neither_opens_nor_blocks_the_exit_barrier(
    job: PluginJob, arrived: int
) -> None:
    """So many of three have arrived when the job lease runs out, and with it who was counted."""
    with job.handlers(3) as made, ThreadPoolExecutor(3) as pool:
        infos = join_all(made)
        root = job.root
        waiting = [pool.submit(exit_barrier, info) for info in infos[:arrived]]
        counted = "terminal_state/num_members"
        wait_until(
            "they are counted",
            lambda: (
                sum(
                    kv.version
                    for key, kv in job.server.gateway.keys(root + b"store/").items()
                    if key.endswith(counted.encode())
                )
                == arrived
            ),
        )
        record = job.server.gateway.keys(root)[root + b"ctl/round"]
        job.server.gateway.revoke(record.lease_id)
        waiting += [pool.submit(exit_barrier, info) for info in infos[arrived:-1]]
        with pytest.raises(dist.DistStoreError, match="the store of this world has lost data"):
            infos[-1].store.set("anything else", "")
        assert not any(each.done() for each in waiting)
        exit_barrier(infos[-1])
        for each in waiting:
            each.result(LIMIT_S)
        assert at_once([handler.shutdown for handler in made]) == [True] * 3
