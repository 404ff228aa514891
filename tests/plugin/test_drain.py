"""A handler that is drained: by a signal, where nobody else wants that, or by an operator."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

import rdzv_etcd
from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler
from tests.library.nodes import at_once, wait_until
from tests.plugin.handlers import PluginJob, handlers, join_all, leave

LONG_S = 600


pytestmark = pytest.mark.usefixtures("default_signals")


def stop(handler: EtcdRendezvousHandler) -> None:
    """Do what an agent does that is told that nodes wait."""
    wait_until("its workers have to stop", handler.num_nodes_waiting)
    with pytest.raises(RendezvousGracefulExitError):
        handler.next_rendezvous()


def test_a_signal_has_the_node_leave_before_its_workers_stop(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says that they had not finished, though the exit code will be 0."""
    with job.handlers(1, "1:2", lease_ttl=LONG_S) as (one,):
        # One made in another thread does not get the signal.
        (two,) = at_once([lambda: job.handler("1:2", lease_ttl=LONG_S)])
        at_once([one.next_rendezvous, two.next_rendezvous])
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until("the node has heard of it", lambda: one._group.drain_reason)
        assert one.num_nodes_waiting() == 0  # it begins to leave
        wait_until("it has left", lambda: one._group.has_left)
        os.kill(os.getpid(), signal.SIGUSR1)  # once more: it ends nobody
        wait_until("the other is told", two.num_nodes_waiting)
        stop(one)
        assert two.next_rendezvous().world_size == 1
        with pytest.raises(RendezvousGracefulExitError, match="drained"):
            _shut_down_in(one, _missing_result)
        assert "workers were stopped before they had finished" in caplog.text
        leave(two)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_ends_the_wait_for_a_round(job: PluginJob) -> None:
    def signal_it() -> None:
        wait_until("its arrival", lambda: job.keys(b"nodes/"))
        os.kill(os.getpid(), signal.SIGUSR1)

    with job.handlers(1, "2", lease_ttl=LONG_S) as (one,), ThreadPoolExecutor(1) as pool:
        signalling = pool.submit(signal_it)
        with pytest.raises(RendezvousGracefulExitError, match="drained: SIGUSR1"):
            one.next_rendezvous()
        signalling.result()
        assert not job.keys(b"nodes/")


def _missing_result() -> None:
    result = None
    result.is_failed()  # type: ignore[attr-defined]  # what torch's launch_agent does


def _workers_failed() -> None:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="<none>")
    raise ChildFailedError("train.py", {0: failure})


def _shut_down_in(handler: EtcdRendezvousHandler, fail: object) -> None:
    """As torch does: in a ``finally``."""
    assert callable(fail)
    try:
        fail()
    finally:
        handler.shutdown()


@pytest.mark.parametrize("looked", [True, False], ids=["it leaves", "its agent did not look"])
def test_workers_that_fail_because_of_a_drain_do_not_fail_the_job(
    job: PluginJob, looked: bool
) -> None:
    """No restart is left: other nodes have stopped theirs, or the scheduler has sent its signal to
    all processes."""
    with job.handlers(2, "1:2", lease_ttl=LONG_S) as (one, two):
        join_all([one, two])
        one._group.drain("SIGUSR1")
        wait_until("the node is drained", lambda: one._group.drain_reason)
        if looked:
            assert one.num_nodes_waiting() == 0
        with pytest.raises(RendezvousGracefulExitError, match="its workers failed meanwhile"):
            _shut_down_in(one, _workers_failed)
        wait_until("the other sees it", two.num_nodes_waiting)
        assert two.next_rendezvous().world_size == 1
        assert not two.is_closed()


def test_a_drained_node_whose_workers_have_finished_finishes_the_job(job: PluginJob) -> None:
    with job.handlers(1, lease_ttl=LONG_S) as (one,):
        one.next_rendezvous()
        one._group.drain("SIGUSR1")
        wait_until("the node has heard of it", lambda: one._group.drain_reason)
        assert one.shutdown()
        assert one.is_closed()


def test_the_end_of_one_node_leaves_the_others_of_its_process_to_the_signal(job: PluginJob) -> None:
    with job.handlers(1) as (one,), handlers(job.server, f"{job.id}-2", "1", 1) as (other,):
        one.next_rendezvous()
        other.next_rendezvous()
        leave(one)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until("the other has heard of it", lambda: other._group.drain_reason)
        leave(other)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_node_that_an_interrupted_launch_left_behind_keeps_no_other_from_the_signal(
    job: PluginJob,
) -> None:
    """torch does not call ``shutdown()`` then."""
    left_behind = job.handler()
    left_behind.next_rendezvous()
    rdzv_etcd.leave_all()
    with job.handlers(1) as (one,):
        one.next_rendezvous()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until("the node has heard of it", lambda: one._group.drain_reason)
        assert left_behind._group.has_left
