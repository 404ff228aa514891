"""``shutdown()`` as torchrun calls it: in a ``finally``, with the agent's end in flight."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler
from tests.library.nodes import LIMIT_S, at_once, wait_until
from tests.plugin.handlers import PluginJob, join_all, leave


def shut_down_after(handler: EtcdRendezvousHandler, error: BaseException | None) -> bool:
    """What ``launch_agent`` does, without letting ``error`` go on."""
    if error is None:
        return handler.shutdown()
    with pytest.raises(type(error)):
        _end_with(handler, error)
    return handler.shutdown()  # again: the same answer


def _end_with(handler: EtcdRendezvousHandler, error: BaseException) -> None:
    try:
        raise error
    finally:
        handler.shutdown()


def closed_marker(job: PluginJob) -> dict[str, object] | None:
    """The closed marker as etcd holds it."""
    value = job.keys(b"ctl/round").get(job.root + b"ctl/round")
    if value is None:
        return None
    closed: dict[str, object] | None = json.loads(value).get("closed")
    return closed


def child_failure() -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=7, error_file="")
    return ChildFailedError("train.py", {3: failure})


def test_success_closes_the_job_and_leaves(job: PluginJob) -> None:
    """All agents finish at about the same time; each is told that etcd knows."""
    with job.handlers(3) as made:
        join_all(made)
        done = at_once([partial(shut_down_after, h, None) for h in made])
        assert done == [True] * 3
        closed = closed_marker(job)
        assert closed is not None
        assert closed["succeeded"] is True
        assert all(handler.is_closed() for handler in made)
        assert [handler.num_nodes_waiting() for handler in made] == [0, 0, 0]
        assert all(handler.shutdown() for handler in made)  # again: nothing happens


def launch_agent(handler: EtcdRendezvousHandler, result: RunResult) -> RunResult:
    """The end of torch's function, by whose name ``result`` is found."""
    try:
        return result
    finally:
        handler.shutdown()


def test_workers_that_hang_in_the_kernel_do_not_finish_the_job(job: PluginJob) -> None:
    """torch 2.13 gives them up, without an exception, where it is told to look for that."""
    with job.handlers(2, "1:2") as (hangs, other):
        join_all([hangs, other])
        launch_agent(hangs, RunResult(WorkerState.UNHEALTHY))
        wait_until("the other sees it", other.num_nodes_waiting)
        assert other.next_rendezvous().world_size == 1


def test_failed_workers_close_the_job_for_everybody(job: PluginJob) -> None:
    with job.handlers(2) as (failing, other):
        join_all([failing, other])
        assert shut_down_after(failing, child_failure())
        wait_until("the other to see it", lambda: other.num_nodes_waiting() > 0)
        assert other.is_closed()
        with pytest.raises(RendezvousClosedError, match=r"rank 3 failed with exit code 7"):
            other.next_rendezvous()


@pytest.mark.parametrize(
    "error",
    [
        RendezvousTimeoutError("too few"),
        SignalException("stop", 15),  # type: ignore[arg-type]
        KeyboardInterrupt(),
        FileNotFoundError(2, "No such file or directory", "train"),
        RuntimeError("the agent does not know its workers any more"),
    ],
    ids=["rendezvous-error", "SIGTERM", "ctrl-c", "no-program", "agent-failed"],
)
def test_who_could_not_go_on_leaves_without_closing(job: PluginJob, error: BaseException) -> None:
    with job.handlers(2, "1:2", lease_ttl=600) as (going, staying):
        join_all([going, staying])
        shut_down_after(going, error)
        wait_until("its leaving", lambda: staying.num_nodes_waiting() > 0)
        assert not staying.is_closed()
        assert staying.next_rendezvous().world_size == 1


@pytest.mark.parametrize("error", [None, child_failure()], ids=["success", "failure"])
def test_an_error_handled_around_the_launch_is_not_how_the_job_ended(
    job: PluginJob, error: BaseException | None
) -> None:
    """torchrun called in an ``except`` block, after a first attempt has failed."""
    try:
        raise ValueError("the attempt before")
    except ValueError:
        handler = job.handler()
        handler.next_rendezvous()
        assert shut_down_after(handler, error)
        assert handler.shutdown()
    closed = closed_marker(job)
    assert closed is not None
    assert closed["succeeded"] is (error is None)


def test_a_spare_whose_job_is_done_is_told_so_where_torch_fails(job: PluginJob) -> None:
    """Torch's agent returns None then, and its caller fails on it: exactly that is mended. Who does
    not catch it, as torchrun, ends with code 0."""
    with job.handlers(2, "1") as (member, spare), ThreadPoolExecutor(1) as pool:
        member.next_rendezvous()
        waiting = pool.submit(spare.next_rendezvous)
        nodes = job.root + b"nodes/"
        wait_until("the spare's arrival", lambda: len(job.server.keys(nodes)) == 2)
        assert shut_down_after(member, None)
        with pytest.raises(RendezvousGracefulExitError, match="the workers have finished"):
            waiting.result(LIMIT_S)
        with pytest.raises(RendezvousGracefulExitError, match="workers have finished") as told:
            _fail_as_torch_does(spare)
        assert isinstance(told.value, SystemExit)
        assert told.value.code == 0


@pytest.mark.parametrize("graceful", [False, True], ids=["no-graceful-exit", "another-error"])
def test_no_other_error_becomes_a_graceful_exit(job: PluginJob, graceful: bool) -> None:
    handler = job.handler()
    handler.next_rendezvous()
    handler._graceful_exit = RendezvousGracefulExitError("done") if graceful else None
    fail = _fail_otherwise if graceful else _fail_as_torch_does
    with pytest.raises(AttributeError):
        fail(handler)


def _fail_as_torch_does(handler: EtcdRendezvousHandler) -> None:
    result = None
    try:
        result.is_failed()  # type: ignore[attr-defined]
    finally:
        handler.shutdown()


def _fail_otherwise(handler: EtcdRendezvousHandler) -> None:
    result = object()
    try:
        result.is_failed()  # type: ignore[attr-defined]
    finally:
        handler.shutdown()


def test_a_handler_that_never_joined_or_does_not_close_leaves_nothing(job: PluginJob) -> None:
    handler = job.handler("2", lease_ttl=600)
    assert not shut_down_after(handler, None)  # nothing was closed
    assert not job.left()
    handler = job.handler(lease_ttl=600)
    handler.next_rendezvous()
    leave(handler)
    assert not job.left()


@pytest.mark.parametrize("error", [None, child_failure()], ids=["success", "failure"])
def test_the_same_id_works_again(job: PluginJob, error: BaseException | None) -> None:
    """At once, while the marker of the run before still stands."""
    for _ in range(2):
        with job.handlers(2) as made:
            assert {info.world_size for info in join_all(made)} == {2}
            assert not any(handler.is_closed() for handler in made)
            at_once([partial(shut_down_after, h, error) for h in made])
    assert closed_marker(job) is not None


def test_the_end_of_a_job_of_other_settings_ends_no_node(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of one that has `after_end=finish`: it began to wait for the id before the end, or after
    it."""
    with (
        job.handlers(1) as (earlier,),
        job.handlers(1, "1:2", after_end="finish", last_call_timeout=0.3) as (waits,),
        ThreadPoolExecutor(1) as pool,
    ):
        earlier.next_rendezvous()
        info = pool.submit(waits.next_rendezvous)
        wait_until("it is in the way", lambda: "its nodes may be dead" in caplog.text)
        assert shut_down_after(earlier, None)
        assert info.result(LIMIT_S).world_size == 1
        assert shut_down_after(waits, None)
    with job.handlers(1, after_end="finish") as (late,):
        assert late.next_rendezvous().world_size == 1
    job.end_leases()  # that of the note that a node was refused


def test_a_node_started_after_the_end_ends_as_it_was_told_to(job: PluginJob) -> None:
    with job.handlers(1, closed_ttl=60) as (handler,):
        handler.next_rendezvous()
        assert shut_down_after(handler, None)
    with (
        job.handlers(1, after_end="finish") as (late,),
        pytest.raises(RendezvousGracefulExitError, match="the workers have finished"),
    ):
        late.next_rendezvous()
