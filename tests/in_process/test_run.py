"""``rdzv_etcd.torch.run`` and what it is made of."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

import rdzv_etcd
import rdzv_etcd.torch
from rdzv_etcd import World
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.torch.gloo import AbandonableCalls, Connections, collectives
from tests.in_process import scenes
from tests.in_process.processes import LIMIT_S, Job, Member, context, running_job
from tests.library.nodes import wait_until
from tests.support.gloo_threads import none_left_behind
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


class Stage:
    """Processes that play scenes in one job."""

    def __init__(self, etcd: str, job: str, folder: Path) -> None:
        self._etcd = etcd
        self._job = job
        self.folder = folder

    @contextmanager
    def playing(self, *calls: tuple[Any, ...]) -> Iterator[list[ForkServerProcess]]:
        """Start a process for each call of a scene."""
        with ExitStack() as stack:
            processes = []
            for place, (scene, *args) in enumerate(calls):
                output = self.folder / f"{place}.json"
                process = context.Process(
                    target=scenes.play, args=(scene, output, self._etcd, self._job, *args)
                )
                process.start()
                stack.callback(process.close)
                stack.callback(process.join)
                stack.callback(process.kill)
                processes.append(process)
            yield processes

    def results(self, processes: list[ForkServerProcess]) -> list[Any]:
        """Return what those that were not killed have written."""
        found = []
        for place, process in enumerate(processes):
            process.join(LIMIT_S)
            if process.exitcode != -signal.SIGKILL:
                assert process.exitcode == 0
                found.append(json.loads((self.folder / f"{place}.json").read_text()))
        return found

    def outcome(self, *calls: tuple[Any, ...]) -> list[Any]:
        with self.playing(*calls) as processes:
            return self.results(processes)


@pytest.fixture
def stage(etcd_server: EtcdServer, job_id: str, tmp_path: Path) -> Stage:
    return Stage(etcd_server.endpoint, job_id, tmp_path)


@pytest.mark.slow
def test_a_silent_member_is_gone_on_without_and_comes_back(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    """Its process is stopped, so that its connections stay open and nothing comes over them: gloo
    would wait for half an hour."""
    with running_job(
        tmp_path,
        *(f"--etcd={etcd_server.endpoint}", f"--job={job_id}", "--nodes=2:3", "--last-call=60"),
        *("--passes=1000000", "--lease-ttl=2", "--min-step-seconds=0.03"),
    ) as job:
        stopped, *others = [job.add() for _ in range(3)]
        job.await_steps(0.0)
        moment_s = stopped.send(signal.SIGSTOP)
        job.await_(
            "a step without it",
            lambda: all(m.last["world_size"] == 2 for m in others if m.last),
        )
        stopped.send(signal.SIGCONT)
        if not comes_back(job, stopped, moment_s):
            assert "gloo holds a collective" in stopped.output
            stopped.killed = True
            job.add()
        job.await_steps(moment_s, size=3)
        job.await_steps(time.monotonic())
        assert all(member.process.is_alive() for member in job.alive)


def comes_back(job: Job, stopped: Member, moment_s: float) -> bool:
    """Whether it makes a step again. gloo's sends may be lost at the end of a connection, and then
    nothing frees it (1 in 50): it ends."""
    job.await_(
        "a step of it, or its end",
        lambda: (
            stopped.process.exitcode is not None
            or (stopped.last is not None and stopped.last["time"] > moment_s)
        ),
    )
    assert stopped.process.exitcode in (None, os.EX_TEMPFAIL)
    return stopped.process.exitcode is None


@pytest.mark.slow
def test_a_process_that_gloo_never_frees_ends_and_logs_why(stage: Stage) -> None:
    stopped, log = stage.folder / "stopped", stage.folder / "log"
    calls = (scenes.stopped_receiver, stopped), (scenes.sender, stopped, log)
    with stage.playing(*calls) as (_, sender):
        sender.join(LIMIT_S)
        assert sender.exitcode == os.EX_TEMPFAIL
    said = log.read_text()
    assert said.count("but a collective is still running") == 1
    assert "gloo holds a collective" in said


@pytest.mark.slow
def test_gloo_is_left_behind_where_it_waits_for_one_that_died(stage: Stage) -> None:
    """Nothing ends its wait for a connection, which would take two and a half hours."""
    assert stage.outcome((scenes.dying_while_connecting,), (scenes.survivor,)) == [[1]]


def test_an_interrupt_while_gloo_connects_ends_only_the_wait(stage: Stage) -> None:
    """gloo connects then, and the process continues."""
    assert stage.outcome((scenes.interrupted_while_connecting,)) == [True]


def test_a_collective_is_seen_while_it_lasts() -> None:
    """Also where nothing of torch's is called any more: only gloo's threads know."""
    store = HashStore()
    limit = timedelta(seconds=LIMIT_S)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, limit), range(2)))
    assert not collectives()

    def begin(rank: int) -> dist.Work:
        return groups[rank].allreduce([torch.ones(1)])  # type: ignore[attr-defined, no-any-return]

    first = begin(0)
    wait_until("seen", collectives)
    held = collectives()
    assert held & collectives()  # the same wait
    begin(1).wait()
    first.wait()
    wait_until("over", lambda: not collectives())
    second = begin(0)
    wait_until("seen again", collectives)
    assert not held & collectives()  # whoever makes one after the other is not held
    begin(1).wait()
    second.wait()


@pytest.mark.slow
def test_a_collective_may_take_longer_than_a_connection(stage: Stage) -> None:
    assert stage.outcome(*[(scenes.slow_member, 7.0)] * 2) == [6.0, 6.0]


def test_a_process_group_that_one_member_could_not_make_before_does_no_harm(stage: Stage) -> None:
    """torch counts it, and would look for the others under another number from then on."""
    assert stage.outcome((scenes.failed_before, 0), (scenes.failed_before, 1)) == [2.0, 2.0]


@pytest.mark.slow
def test_a_wait_for_a_late_member_is_logged(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    def said(late: int) -> list[str]:
        folder = tmp_path / str(late)
        folder.mkdir()
        stage = Stage(etcd_server.endpoint, f"{job_id}-{late}", folder)
        return ["".join(lines) for lines in stage.outcome(*[(scenes.late_member, late, 12.0)] * 2)]

    awaited = (
        "waiting for rank 0 to make the process group",
        "waiting for all members to make the process group: 1 of 2 are here",
    )
    with ThreadPoolExecutor(2) as pool:
        for line, texts in zip(awaited, pool.map(said, range(2)), strict=True):
            assert any(line in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "error"),
    [
        ("is killed", "DistNetworkError"),
        ("leaves", "DistNetworkError"),
        ("stops", "DistNetworkError"),
        ("falls silent", "DistNetworkError"),
        ("is late", "DistStoreError"),
    ],
)
def test_nobody_waits_for_a_store_that_rank_0_does_not_serve(
    stage: Stage, fate: str, error: str
) -> None:
    """Its port listens from the beginning: torch's client, once connected, waits for the first
    answer without a limit. One that falls silent has accepted the connection."""
    awaited = stage.folder / "awaited"
    limit_s = 3.0 if fate == "is late" else 10 * LIMIT_S
    waits = scenes.waiting_for_rank_0, limit_s
    with stage.playing(waits, (scenes.rank_0_without_store, fate, awaited)) as processes:
        ((name, text),) = stage.results(processes[:1])
    assert awaited.exists()
    assert name == error, text


def test_an_interrupt_ends_the_wait_for_rank_0_at_once(stage: Stage) -> None:
    awaited = stage.folder / "awaited"
    waits = scenes.waiting_for_rank_0, 10 * LIMIT_S
    with stage.playing(waits, (scenes.rank_0_without_store, "is late", awaited)) as processes:
        wait_until("rank 0 is waited for", awaited.exists)
        interrupt(processes[0])
        assert stage.results(processes[:1]) == [["KeyboardInterrupt", ""]]


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_another_member_at_once(stage: Stage) -> None:
    """Rank 0, which serves the store, waits in torch's code."""
    waits = stage.folder / "waits"
    with stage.playing((scenes.rank_0_waits, waits), (scenes.late_rank_1,)) as processes:
        wait_until("rank 1 is waited for", waits.exists)
        interrupt(processes[0])
        assert stage.results(processes[:1]) == ["KeyboardInterrupt"]


def interrupt(process: ForkServerProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)


def test_nobody_waits_for_one_that_has_left(stage: Stage) -> None:
    call = scenes.leaving_member, stage.folder / "done"
    _, (said, took_s) = sorted(stage.outcome(call, call))
    assert "enough" in said
    assert "Connection closed" in said
    assert took_s < 25.0  # it would be 30 s if the member could still take part


def test_a_member_that_calls_something_else_is_named(stage: Stage) -> None:
    said = "".join(stage.outcome(*[(scenes.other_exchange,)] * 2))
    assert "rank 1 gave b'7' instead of its progress" in said


def test_a_member_s_own_mistake_ends_that_member_only(stage: Stage) -> None:
    seen = sorted(stage.outcome(*[(scenes.wrong_member,)] * 3), key=lambda one: len(one["sizes"]))
    assert [one["sizes"] for one in seen] == [[3], [3, 2], [3, 2]]
    assert "size" in seen[0]["error"]
    assert [one["error"] for one in seen[1:]] == [None, None]


def test_a_member_is_lost_where_torch_looks_at_every_collective(stage: Stage) -> None:
    ((before, said, is_of_the_world, after),) = stage.outcome(
        (scenes.in_detail, False), (scenes.in_detail, True)
    )
    assert (before, after) == (2, 1)
    assert is_of_the_world, said


def test_an_error_may_come_before_it_is_known_that_a_member_is_gone(stage: Stage) -> None:
    assert stage.outcome((scenes.dying_after_the_other,), (scenes.raising_before,)) == [[2, 1]]


def test_a_drained_member_leaves_and_the_others_continue(stage: Stage) -> None:
    assert sorted(stage.outcome(*[(scenes.drained_member,)] * 3)) == [[3], [3, 2], [3, 2]]


def test_ddp_is_made_anew_in_each_world(stage: Stage) -> None:
    stop = stage.folder / "stop"
    progress = [stage.folder / f"progress{place}" for place in range(3)]

    def await_size(size: int, files: list[Path]) -> None:
        wait_until(
            f"a world of {size}",
            lambda: all(file.exists() and f" {size} " in file.read_text() for file in files),
            LIMIT_S,
        )

    with stage.playing(*[(scenes.parallel_training, file, stop) for file in progress]) as processes:
        await_size(3, progress)
        processes[1].kill()
        await_size(2, [progress[0], progress[2]])
        stop.touch()
        one, other = stage.results(processes)
    assert one == other
    assert one["step"] > 1


# --- alone, in this process ----------------------------------------------------------------------


def run_alone(etcd: EtcdServer, job: str, train: Callable[[World], object], **more: Any) -> None:
    with rdzv_etcd.connect(etcd.endpoint, job=job, nodes=1) as group:
        rdzv_etcd.torch.run(group, train, backend="gloo", **more)


@pytest.mark.parametrize("error", [RuntimeError("mine"), ValueError("mine"), KeyboardInterrupt()])
def test_every_other_error_is_raised_at_once(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, error: BaseException
) -> None:
    def train(_world: World) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_alone(etcd_server, job_id, train)
    assert raised.value is error
    assert not dist.is_initialized()


async def asynchronous(_world: World) -> None: ...


def generator(_world: World) -> Iterator[None]:
    yield


class Asynchronous:
    async def __call__(self, _world: World) -> None: ...


def test_arguments_are_looked_at_before_the_group_is_touched() -> None:
    untouched: Any = None
    train: Any
    for train in (None, 3, asynchronous, generator, Asynchronous()):
        with pytest.raises(MisuseError, match="train is"):
            rdzv_etcd.torch.run(untouched, train)
    with pytest.raises(MisuseError, match="the time limit is '30'"):
        rdzv_etcd.torch.run(untouched, print, over_within_s="30")  # type: ignore[arg-type]
    wrong: Any
    for wrong in ({"timeout": 30}, {"backend": 3}):
        for call in (partial(rdzv_etcd.torch.run, train=print), rdzv_etcd.torch.init_process_group):
            with pytest.raises(MisuseError, match=r"(timeout is 30|backend is 3) \(int\)"):
                call(untouched, **wrong)


def test_a_process_group_that_was_given_up_waits_for_nobody() -> None:
    """Also if that was before there was a connection that could be ended."""
    calls = AbandonableCalls()
    calls.give_up(with_gloo=False)
    with pytest.raises(dist.DistNetworkError, match="a member was lost"):
        calls.run(threading.Event().wait)


@pytest.mark.parametrize("train", [asynchronous, generator])
def test_a_train_that_has_only_begun_is_no_world_s_end(
    etcd_server: EtcdServer, job_id: str, train: Callable[[World], object]
) -> None:
    """It would be called in one world after the other."""

    def calls_it(world: World) -> object:
        return train(world)

    with pytest.raises(MisuseError, match="train returned an object of type"):
        run_alone(etcd_server, job_id, calls_it)
    gc.collect()  # a coroutine that nobody has awaited would be an error here


def test_a_collective_that_fails_though_nobody_is_gone_is_raised(
    etcd_server: EtcdServer, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(_world: World) -> None:
        raise dist.DistNetworkError("broken")

    with pytest.raises(dist.DistNetworkError, match="broken"):
        run_alone(etcd_server, job_id, train, over_within_s=5.1)
    assert "no member is known to be gone" in caplog.text


def test_an_error_in_a_world_that_is_over_leads_to_the_next_and_is_shown(
    leak_check: LeakCheck,
    etcd_server: EtcdServer,
    job_id: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    epochs = []
    with rdzv_etcd.connect(
        etcd_server.endpoint, job=job_id, nodes=(1, 2), last_call_timeout=0.1
    ) as group:

        def train(world: World) -> None:
            epochs.append(world.epoch)
            if len(epochs) == 1:
                other = rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=(1, 2))
                with other, pytest.raises(rdzv_etcd.errors.JoinTimeoutError):
                    other.join(0.3)  # this node does not come back for it in time
                assert world.wait_over(LIMIT_S)
                raise RuntimeError("whatever")
            value = torch.ones(3)
            dist.all_reduce(value)
            group.finish()

        rdzv_etcd.torch.run(group, train, backend="gloo")
    assert len(epochs) == 2
    assert any("whatever" in str(r.exc_info) for r in caplog.records if r.levelname == "WARNING")


def test_a_world_has_one_process_group(etcd_server: EtcdServer, job_id: str) -> None:
    with rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=1) as group:
        world = group.join()
        with pytest.raises(MisuseError, match="rank and world_size"):
            rdzv_etcd.torch.init_process_group(world, "gloo", rank=0, world_size=1)
        rdzv_etcd.torch.init_process_group(world, "gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        with pytest.raises(MisuseError, match="one process group"):
            rdzv_etcd.torch.init_process_group(world, "gloo")
        rdzv_etcd.torch.init_process_group(group.join(), "gloo")
        rdzv_etcd.torch.destroy_process_group()
        rdzv_etcd.torch.destroy_process_group()
        assert not dist.is_initialized()
        assert rdzv_etcd.torch.newest_member(group.join(), 7) == 0
        with pytest.raises(MisuseError, match="progress is -1"):
            rdzv_etcd.torch.newest_member(group.join(), -1)


@pytest.mark.parametrize("how", ["destroyed", "open", "failed", "run"])
def test_a_group_that_is_dropped_leaves_whatever_has_become_of_its_process_group(
    etcd_server: EtcdServer, job_id: str, how: str
) -> None:
    left = threading.Event()

    def fail(_world: World) -> None:
        raise KeyError("mine")

    def work() -> None:
        group = rdzv_etcd.connect(etcd_server.endpoint, job=job_id, nodes=1)
        group.when_left(left.set)
        if how == "run":
            with contextlib.suppress(KeyError):
                rdzv_etcd.torch.run(group, fail, backend="gloo")
            return
        world = group.join()
        rdzv_etcd.torch.init_process_group(world, "gloo")
        if how == "failed":
            with contextlib.suppress(MisuseError):
                rdzv_etcd.torch.init_process_group(world, "gloo")
        if how == "destroyed":
            rdzv_etcd.torch.destroy_process_group()

    work()
    gc.collect()
    try:
        assert left.wait(LIMIT_S)
    finally:
        rdzv_etcd.torch.destroy_process_group()


OUTLIVED = """
import faulthandler, sys
import torch
import torch.distributed as dist
import rdzv_etcd, rdzv_etcd.torch
from torch.nn.parallel import DistributedDataParallel

faulthandler.dump_traceback_later(180, exit=True)
sys.setswitchinterval(1000)  # gloo's threads get the interpreter only when it is let go of
with rdzv_etcd.connect(sys.argv[1], job=sys.argv[2], nodes=1) as group:
    for _ in range(200):  # it takes a hundred until one is late
        rdzv_etcd.torch.init_process_group(group.join(), "gloo")
        parallel = DistributedDataParallel(torch.nn.Linear(1, 1))
        parallel(torch.ones(4, 1)).sum().backward()
        dist.all_gather([torch.zeros(1)], torch.ones(1))
        rdzv_etcd.torch.destroy_process_group()
        del parallel
    group.finish()
print("went well")
"""


@pytest.mark.slow
def test_a_model_may_outlive_its_process_group(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    """It has a reference to what was destroyed; and no thread is left in the end."""
    (tmp_path / "exits").mkdir()
    command = [sys.executable, "-c", OUTLIVED, etcd_server.endpoint, job_id]
    with none_left_behind(tmp_path / "exits"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went well\n"), done.stderr


def test_only_connections_of_the_process_group_are_ended() -> None:
    """Neither are others to the same ports of other hosts."""

    def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
        client = stack.enter_context(closing(socket.create_connection(server.getsockname())))
        return client, stack.enter_context(closing(server.accept()[0]))

    def listening(address: str, port: int = 0) -> socket.socket:
        return stack.enter_context(closing(socket.create_server((address, port))))

    with ExitStack() as stack:
        store, peer = listening("127.0.0.1"), listening("127.0.0.1")
        ports = [one.getsockname()[1] for one in (store, peer)]
        others = [listening("127.0.0.1"), *(listening("127.0.0.2", port) for port in ports)]
        connections = Connections(ports[0])
        ended = [connected(store)]
        connections.gloo_begins()
        own = listening("127.0.0.1")
        assert connections.listening() == [own.getsockname()]
        connections.gloo_is_done(connections.listening(), [peer.getsockname()])
        ended += [connected(one) for one in (store, peer, own)]
        left_alone = [connected(one) for one in others]
        connections.close()
        assert connections.closed.is_open
        for _, accepted in ended:
            assert accepted.recv(1) == b""
        for client, accepted in left_alone:
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"


_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_files_that_this_process_has_locked_stay_locked(tmp_path: Path) -> None:
    """A process loses its locks on a file when it closes any descriptor of it, and all descriptors
    are looked through for sockets."""
    with (tmp_path / "lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        connections = Connections(1)
        connections.gloo_begins()
        connections.gloo_is_done(connections.listening(), [])
        connections.close()
        other = subprocess.run(
            [sys.executable, "-c", _LOCK, file.name], capture_output=True, check=False, timeout=60
        )
    assert b"BlockingIOError" in other.stderr
