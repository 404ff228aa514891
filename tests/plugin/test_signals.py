"""Signals to an agent's process: whose they are, and since when.

What becomes of the process and its node: ``tests/torchrun/test_signals.py``, ``test_drain.py``.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)

from rdzv_etcd import Group
from rdzv_etcd.process import has_default_action
from rdzv_etcd.settings import Settings
from rdzv_etcd.torch_plugin import handler
from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import at_once
from tests.plugin.handlers import PluginJob, handlers, leave, parameters, run_program
from tests.support.processes import free_port

HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


pytestmark = pytest.mark.usefixtures("default_signals")


def handled_here() -> list[signal.Signals]:
    return [number for number in HANDLED if not has_default_action(number)]


def test_they_are_handled_while_there_is_a_handler(job: PluginJob) -> None:
    with job.handlers(1) as (one,):
        assert handled_here() == [*HANDLED]
        with handlers(job.server, f"{job.id}-2", "1", 1):
            one.next_rendezvous()
        assert handled_here() == [*HANDLED]
        leave(one)
        assert not handled_here()


def test_a_handler_that_cannot_be_made_leaves_them() -> None:
    with pytest.raises(RendezvousConnectionError):
        create_handler(parameters(f"127.0.0.1:{free_port()}", "a job", "1", connect_timeout=0.1))
    assert not handled_here()


def test_only_the_main_thread_can_handle_them(job: PluginJob) -> None:
    def take_part() -> None:
        assert threading.current_thread() is not threading.main_thread()
        with job.handlers(1) as (one,):
            one.next_rendezvous()
            assert not handled_here()

    at_once([take_part])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_who_handles_or_ignores_one_before_or_afterwards_keeps_it(
    job: PluginJob, number: signal.Signals
) -> None:
    def theirs(number: int, frame: FrameType | None) -> None: ...

    for theirs_is in (theirs, signal.SIG_IGN):
        for before in (True, False):
            signal.signal(number, theirs_is if before else signal.SIG_DFL)
            with handlers(job.server, f"{job.id}-{theirs_is}-{before}", "1", 1) as (one,):
                one.next_rendezvous()
                if not before:
                    signal.signal(number, theirs_is)
                leave(one)
            assert signal.getsignal(number) == theirs_is
            signal.signal(number, signal.SIG_DFL)


_C_HANDLER = """
import faulthandler, os, signal, sys
from tests.plugin.handlers import handlers, leave

number = getattr(signal, sys.argv[3])

def register():
    faulthandler.register(number)  # past Python's own signal handling

when = sys.argv[4]
if when == "before":
    register()
with handlers(sys.argv[1], sys.argv[2], "1", 1) as (one,):
    one.next_rendezvous()
    if when == "while":
        register()
    os.kill(os.getpid(), number)
    print(one.num_nodes_waiting(), one._group.drain_reason)
    leave(one)
os.kill(os.getpid(), number)
print("goes on")
"""


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGUSR1, "before"), (signal.SIGTERM, "while")]
)
def test_so_does_a_handler_in_c(job: PluginJob, number: signal.Signals, when: str) -> None:
    """Python knows nothing of it: ``signal.getsignal`` says that nobody handles the signal."""
    done = run_program(_C_HANDLER, job.server.endpoint, job.id, number.name, when)
    assert (done.returncode, done.stdout) == (0, "0 None\ngoes on\n"), done.stderr
    assert done.stderr.count("most recent call first") >= 2  # the stacks, both times


def test_a_node_that_is_drained_before_it_is_there_leaves_when_it_is(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = handler._open_group

    def while_it_connects(settings: Settings) -> Group:
        os.kill(os.getpid(), signal.SIGUSR1)
        return connect(settings)

    monkeypatch.setattr(handler, "_open_group", while_it_connects)
    with job.handlers(1, "2") as (one,):
        with pytest.raises(RendezvousGracefulExitError, match="drained: SIGUSR1"):
            one.next_rendezvous()
        assert not job.keys(b"nodes/")
