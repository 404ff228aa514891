"""A handler whose agent forms no world, and what its workers connect with: ``in_process=1``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

import rdzv_etcd
from rdzv_etcd.errors import (
    JobClosedError,
    JobSettingsMismatchError,
    JoinTimeoutError,
    MisuseError,
    RendezvousFailedError,
    SettingsError,
)
from rdzv_etcd.process import IN_A_WORLD, tell_agent
from rdzv_etcd.settings.parse import WORKER_VARIABLE
from rdzv_etcd.torch import connect_worker
from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler, create_handler
from tests.library.nodes import LIMIT_S, at_once, wait_until
from tests.plugin.handlers import PluginJob, parameters
from tests.plugin.test_shutdown import child_failure, shut_down_after
from tests.support.leaks import LeakCheck
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


def as_worker(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Have this process's environment be what torchrun gives a worker."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


@contextmanager
def workers(
    handler: EtcdRendezvousHandler, monkeypatch: pytest.MonkeyPatch, size: int
) -> Iterator[list[rdzv_etcd.Group]]:
    """The workers of one agent, in this process; in the end they leave."""
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    groups = []
    try:
        for rank in range(size):
            as_worker(monkeypatch, rank, size)
            groups.append(connect_worker())
        yield groups
    finally:
        for group in groups:
            group.leave()


def test_workers_of_one_host_are_neighbours(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a node, and --nnodes counts hosts; to torch every agent is a world of its own."""
    with (
        job.handlers(2, in_process=1) as (first, second),
        workers(first, monkeypatch, 2) as ones,
        workers(second, monkeypatch, 2) as others,
    ):
        worlds = at_once([group.join for group in (*others, *ones)])
        assert {world.size for world in worlds} == {4}
        assert [world.rank % 2 for world in worlds] == [0, 1, 0, 1]
        assert {world.rank // 2 for world in worlds[:2]} in ({0}, {1})
        assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


def test_a_host_joins_as_a_whole(job: PluginJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker of a host is no reason to take it in, or to disturb the others."""
    with (
        job.handlers(2, "1:2", in_process=1, last_call_timeout=0.3) as (first, second),
        workers(first, monkeypatch, 2) as ones,
        workers(second, monkeypatch, 2) as others,
        rdzv_etcd.observe(job.server.endpoint, job=job.id) as observer,
        ThreadPoolExecutor() as pool,
    ):
        half = pool.submit(others[0].join)
        wait_until("an arrival", lambda: len(observer.state().nodes) == 1)
        worlds = at_once([group.join for group in ones])
        assert [world.size for world in worlds] == [2, 2]
        rest = pool.submit(others[1].join)
        assert all(world.wait_over(LIMIT_S) for world in worlds)
        joined = [*at_once([group.join for group in ones]), half.result(), rest.result()]
        assert [(world.rank, world.size) for world in joined] == [(n, 4) for n in range(4)]


def test_what_counts_nodes_otherwise_is_refused(job: PluginJob) -> None:
    for other in ({"node_unit": 2}, {"segment_size": 2, "domain_key": "rack"}):
        with pytest.raises(SettingsError, match="excludes segment_size and node_unit"):
            job.handler("2", in_process=1, **other)


def test_a_failure_ends_every_agent(job: PluginJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose workers do not notice."""
    with (
        job.handlers(1, in_process=1, closed_ttl=1) as (handler,),
        workers(handler, monkeypatch, 1) as (worker,),
    ):
        world = worker.join()
        assert handler.num_nodes_waiting() == 0
        assert worker.fail("no good")
        assert world.over
        wait_until("the agent's notice", lambda: handler.num_nodes_waiting() == 1)
        with pytest.raises(RendezvousClosedError, match=r"failed: closed by .*: no good"):
            handler.next_rendezvous()


def test_an_agent_that_missed_the_end_learns_it(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Having been cut off while the marker stood: its run's end is remembered for longer."""
    with (
        job.handlers(1, in_process=1, closed_ttl=1, ended_ttl=60) as (handler,),
        workers(handler, monkeypatch, 2) as made,
    ):
        at_once([worker.join for worker in made])
        assert made[0].fail("no good")
        wait_until("the marker's end", lambda: not job.keys(b"ctl/round"))
        with pytest.raises(RendezvousClosedError, match="no good"):
            handler.next_rendezvous()


def test_workers_that_start_as_the_job_finishes_do_not_begin_it_anew(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job.handlers(2, "1:2", in_process=1, last_call_timeout=0.3) as (first, second):
        with workers(first, monkeypatch, 1) as (worker,):
            worker.join()
            second.next_rendezvous()  # its agent starts them
            assert worker.finish()
        as_worker(monkeypatch, 0, 1)
        with connect_worker() as late, pytest.raises(JobClosedError) as end:
            late.join()
        assert end.value.succeeded


def test_a_host_that_cannot_join_leaves_the_job_alone(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its agent does not start its workers again, nor fail the job if no restart is left."""
    with (
        job.handlers(1, "1:2", in_process=1, last_call_timeout=0.3) as (running,),
        workers(running, monkeypatch, 1) as (worker,),
    ):
        world = worker.join()
        refused = job.handler("1:3", in_process=1)
        with (
            workers(refused, monkeypatch, 1) as (other,),
            pytest.raises(JobSettingsMismatchError),
        ):
            other.join()
        with pytest.raises(RendezvousError, match="this host's workers cannot join: "):
            refused.next_rendezvous()
        assert shut_down_after(refused, child_failure())
        assert "the job continues without it" in caplog.text
        assert not world.over
        assert is_open(job)


def test_what_kept_a_worker_out_is_forgotten_when_it_tries_again(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its agent would not start it again if it is killed then."""
    with (
        job.handlers(1, "2", in_process=1) as (handler,),
        workers(handler, monkeypatch, 1) as (worker,),
        ThreadPoolExecutor() as pool,
    ):
        with pytest.raises(JoinTimeoutError):
            worker.join(timeout_s=0.3)
        with pytest.raises(RendezvousError, match=r"cannot join: .*not formed"):
            handler.next_rendezvous()
        again = pool.submit(worker.join)
        wait_until("its arrival", lambda: job.keys(b"nodes/"))
        assert handler.next_rendezvous().world_size == 1
        worker.leave()
        with pytest.raises(RendezvousFailedError):
            again.result()


def test_nothing_but_the_agents_pipe_is_written(tmp_path: Path) -> None:
    """In another container, its path may lead to any file."""
    file = tmp_path / "checkpoint"
    file.write_text("weights")
    tell_agent((str(file), file.stat().st_ino), IN_A_WORLD)
    tell_agent((str(tmp_path / "nothing"), 1), IN_A_WORLD)
    assert file.read_text() == "weights"


@pytest.mark.parametrize("takes_part", [True, False])
def test_failed_workers_end_the_job_if_they_were_in_it(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch, takes_part: bool
) -> None:
    with (
        job.handlers(2, "1:2", in_process=1, last_call_timeout=0.3) as (running, fails),
        workers(running, monkeypatch, 1) as (worker,),
        workers(fails, monkeypatch, 1) as (other,),
    ):
        worker.join()
        if takes_part:
            at_once([worker.join, other.join])
        assert shut_down_after(fails, child_failure())
        assert is_open(job) is not takes_part


def is_open(job: PluginJob) -> bool:
    with rdzv_etcd.observe(job.server.endpoint, job=job.id) as observer:
        return observer.state().closure is None


def test_the_end_of_an_earlier_run_is_not_that_of_this_one(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job.handlers(1) as (earlier,):
        earlier.next_rendezvous()
        earlier.set_closed()
    with job.handlers(1, in_process=1) as (handler,):
        assert handler.is_closed()
        assert handler.num_nodes_waiting() == 0
        with workers(handler, monkeypatch, 1) as (worker,):
            assert worker.join().size == 1


def test_workers_that_took_no_part_are_pointed_out(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    handler = job.handler(in_process=1)
    handler.next_rendezvous()
    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        assert handler.shutdown()
    wait_until("the warning", lambda: "rdzv_etcd.torch.connect_worker()" in caplog.text)


def test_workers_log_in_as_the_agent_does(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)
    handler = create_handler(parameters(auth_etcd, job_id, "1", in_process=1))
    with workers(handler, monkeypatch, 1) as (worker,):
        assert worker.join().size == 1
        assert USER_PASSWORD not in os.environ[WORKER_VARIABLE]
        assert worker.finish()
    assert handler.shutdown()
    assert WORKER_VARIABLE not in os.environ


def test_what_is_meant_for_workers_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    with pytest.raises(MisuseError, match="in_process=1"):
        connect_worker()
    with pytest.raises(SettingsError, match="connect_worker"):
        rdzv_etcd.connect("localhost", job="x", nodes=1, in_process=True)
