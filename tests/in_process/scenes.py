"""What single processes of the tests do. Each writes one JSON line when it is done."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, HashStore, TCPStore, set_debug_level
from torch.nn.parallel import DistributedDataParallel

import rdzv_etcd
import rdzv_etcd.torch
from rdzv_etcd import Group, World
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.process import Latch
from rdzv_etcd.torch import recovery
from rdzv_etcd.torch.gloo import LEFT_BEHIND, AbandonableCalls
from tests.in_process.processes import LIMIT_S, die_with_parent

_WAIT = Latch.wait.__code__


def play(scene: Callable[..., object], output: Path, *args: object) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    result = scene(*args)
    output.write_text(json.dumps(result))


def slow_member(etcd: str, job: str, delay_s: float) -> float:
    """One member comes late to a collective; returns its result."""
    results = []
    with rdzv_etcd.connect(etcd, job=job, nodes=2) as group:

        def train(world: World) -> None:
            value = torch.tensor([world.rank + 1.0])
            dist.all_reduce(value)
            if world.rank == 1:
                time.sleep(delay_s)  # it is slow
            dist.all_reduce(value)
            if world.rank == 1:
                time.sleep(delay_s)
                dist.send(value, 0)
            else:
                dist.recv(value, 1)
            world.barrier("done")
            results.append(value.item())
            group.finish()

        rdzv_etcd.torch.run(group, train, backend="gloo")
    return results[0]


def failed_before(etcd: str, job: str, failed: int) -> float:
    """A process in which a process group could not be made before; returns a sum over both."""
    if failed:
        with contextlib.suppress(dist.DistStoreError):  # nobody else comes there
            dist.init_process_group(
                "gloo", store=HashStore(), rank=1, world_size=2, timeout=timedelta(seconds=0.1)
            )
    value = torch.ones(1)
    with rdzv_etcd.connect(etcd, job=job, nodes=2) as group:
        world = group.join()
        rdzv_etcd.torch.init_process_group(world, "gloo")
        dist.all_reduce(value)
        world.barrier("done")
        rdzv_etcd.torch.destroy_process_group()
    return value.item()


def drained_member(etcd: str, job: str) -> list[int]:
    """One of three is drained; the others go on and finish. Returns the worlds' sizes."""
    sizes: list[int] = []
    with rdzv_etcd.connect(etcd, job=job, nodes=(2, 3), last_call_timeout=60) as group:

        def train(world: World) -> None:
            sizes.append(world.size)
            dist.all_reduce(torch.zeros(1))
            if world.size == 2:
                world.barrier("done")
                group.finish()
                return
            if world.rank == 1:
                group.drain("enough")
            while not world.should_yield:
                dist.all_reduce(torch.zeros(1))

        rdzv_etcd.torch.run(group, train, backend="gloo")
    return sizes


def wrong_member(etcd: str, job: str) -> dict[str, Any]:
    """One of three makes a mistake that is its own; the others finish without it."""
    sizes: list[int] = []
    with rdzv_etcd.connect(etcd, job=job, nodes=(2, 3), last_call_timeout=60) as group:

        def train(world: World) -> None:
            sizes.append(world.size)
            dist.all_reduce(torch.zeros(1))
            if world.size == 3 and world.rank == 1:
                torch.zeros(2) @ torch.zeros(3)
            dist.all_reduce(torch.zeros(1))
            world.barrier("done")
            group.finish()

        try:
            rdzv_etcd.torch.run(group, train, backend="gloo")
        except RuntimeError as error:
            return {"sizes": sizes, "error": str(error)}
    return {"sizes": sizes, "error": None}


def late_member(etcd: str, job: str, late: int, delay_s: float) -> list[str]:
    """One rank takes long to make the process group; returns what is said meanwhile."""
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("rdzv_etcd").addHandler(Said())
    with rdzv_etcd.connect(etcd, job=job, nodes=2) as group:
        world = group.join()
        if world.rank == late:
            time.sleep(delay_s)  # it loads its data
        rdzv_etcd.torch.init_process_group(world, "gloo")
        dist.all_reduce(torch.zeros(1))
        world.barrier("done")
        rdzv_etcd.torch.destroy_process_group()
    return said


def rank_0_without_store(etcd: str, job: str, fate: str, awaited: Path) -> None:
    """What happens to rank 0 when the other member waits for it to serve the store."""
    with rdzv_etcd.connect(etcd, job=job, nodes=2, lease_ttl=2, rank_key="value:0") as group:
        listener = group.join().take_listener()
        assert listener is not None
        with closing(listener.socket) as ours, ExitStack() as kept:  # while the process lives
            assert select.select([ours], [], [], LIMIT_S)[0]
            if fate == "falls silent":
                assert kept.enter_context(closing(ours.accept()[0])).recv(1)
            awaited.touch()
            if fate == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fate == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fate != "is late":
                group.leave("enough")
            time.sleep(LIMIT_S)


def waiting_for_rank_0(etcd: str, job: str, timeout_s: float) -> list[str]:
    """The error in the making of a process group whose rank 0 serves no store."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit = timedelta(seconds=timeout_s)
    try:
        with rdzv_etcd.connect(etcd, job=job, nodes=2, lease_ttl=2, rank_key="value:1") as group:
            rdzv_etcd.torch.init_process_group(group.join(), "gloo", limit)
    except (RuntimeError, KeyboardInterrupt) as error:
        return [type(error).__name__, str(error)]
    return []


def rank_0_waits(etcd: str, job: str, waits: Path) -> str:
    """It waits for the other member; returns what ends that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with rdzv_etcd.connect(etcd, job=job, nodes=2, rank_key="value:0") as group:
        world = group.join()

        def tell() -> None:
            counted = TCPStore(*(world.master.address, world.master.port), is_master=False)
            while counted.add("rdzv_etcd/there", 0) < 1:
                time.sleep(0.02)  # stores send no event
            waits.touch()

        threading.Thread(target=tell, daemon=True).start()
        try:
            rdzv_etcd.torch.init_process_group(world, "gloo", timedelta(seconds=10 * LIMIT_S))
        except KeyboardInterrupt as error:
            return type(error).__name__
    return ""


def late_rank_1(etcd: str, job: str) -> None:
    with rdzv_etcd.connect(etcd, job=job, nodes=2, rank_key="value:1") as group:
        group.join().wait_over(LIMIT_S)


def leaving_member(etcd: str, job: str, done: Path) -> list[Any]:
    """One member leaves with its process group open, in the middle; returns the other's error, and
    how long that took."""
    with rdzv_etcd.connect(etcd, job=job, nodes=2) as group:
        world = group.join()
        rdzv_etcd.torch.init_process_group(world, "gloo")
        dist.all_reduce(torch.zeros(1))
        if world.rank == 1:
            group.leave("enough")
            until_s = time.monotonic() + LIMIT_S
            while not done.exists() and time.monotonic() < until_s:  # its connections stay open
                time.sleep(0.02)
            return []
        begun_s = time.monotonic()
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            took_s = time.monotonic() - begun_s
            world.wait_over(LIMIT_S)  # its connections' end may be here before etcd's word
            return [f"{world.change}: {error}", took_s]
        finally:
            done.touch()
    return []


def other_exchange(etcd: str, job: str) -> str:
    """One member exchanges something else; returns the error."""
    with rdzv_etcd.connect(etcd, job=job, nodes=2) as group:
        world = group.join()
        try:
            if world.rank == 1:
                world.exchange(b"7")
            else:
                rdzv_etcd.torch.newest_member(world, 7)
        except MisuseError as error:
            return str(error)
        finally:
            world.barrier("done")
    return ""


_LARGE = 1 << 26
"""Numbers: no connection has room for so many."""


def stopped_receiver(etcd: str, job: str, stopped: Path) -> None:
    """It is ready to receive when it stops."""
    with rdzv_etcd.connect(etcd, job=job, nodes=2, lease_ttl=2, rank_key="b") as group:
        rdzv_etcd.torch.init_process_group(group.join(), "gloo")
        dist.irecv(torch.empty(_LARGE), 0)
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def sender(etcd: str, job: str, stopped: Path, log: Path) -> None:
    """It sends more than there is room for to a member that has stopped."""
    logging.basicConfig(filename=log)

    def train(_world: World) -> None:
        while not stopped.exists():
            time.sleep(0.02)  # files send no event
        dist.send(torch.zeros(_LARGE), 1)

    with rdzv_etcd.connect(etcd, job=job, nodes=2, lease_ttl=2, rank_key="a") as group:
        rdzv_etcd.torch.run(group, train, backend="gloo")


def dying_while_connecting(etcd: str, job: str) -> None:
    """The other member is about to connect to it when it dies."""
    dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with rdzv_etcd.connect(etcd, job=job, nodes=(1, 2), last_call_timeout=60) as group:
        rdzv_etcd.torch.init_process_group(group.join(), "gloo")


def survivor(etcd: str, job: str) -> list[int]:
    """The sizes of its worlds until it is alone."""
    sizes: list[int] = []

    def train(world: World) -> None:
        sizes.append(world.size)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == world.size
        if world.size == 1:
            group.finish()

    with rdzv_etcd.connect(etcd, job=job, nodes=(1, 2), last_call_timeout=60) as group:
        rdzv_etcd.torch.run(group, train, backend="gloo")
    return sizes


def in_detail(etcd: str, job: str, dies: bool) -> list[Any]:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL. Returns the sizes of its worlds, what the collective
    said that failed, and whether it is taken for one."""
    set_debug_level(DebugLevel.DETAIL)
    seen: list[Any] = []

    def train(world: World) -> None:
        seen.append(world.size)
        dist.all_reduce(torch.ones(1))
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while world.size > 1:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            seen.append(str(error))
            seen.append(recovery._is_from_end_of_world(error))
            raise
        group.finish()

    options: Any = {"last_call_timeout": 60, "lease_ttl": 2, "rank_key": "b" if dies else "a"}
    with rdzv_etcd.connect(etcd, job=job, nodes=(1, 2), **options) as group:
        rdzv_etcd.torch.run(group, train, backend="gloo")
    return seen


def dying_after_the_other(etcd: str, job: str) -> None:
    """It dies when the other's process group has ended: ``train`` has raised there."""
    with rdzv_etcd.connect(etcd, job=job, nodes=(1, 2), rank_key="b", lease_ttl=2) as group:
        rdzv_etcd.torch.init_process_group(group.join(), "gloo")
        with contextlib.suppress(RuntimeError):
            dist.recv(torch.empty(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)


def raising_before(etcd: str, job: str) -> list[int]:
    """It raises before it can be known that the other one is gone. Returns its worlds' sizes."""
    recovery._KNOWN_S = LIMIT_S
    sizes: list[int] = []

    def train(world: World) -> None:
        sizes.append(world.size)
        if world.size > 1:
            raise RuntimeError("whatever")
        group.finish()

    with rdzv_etcd.connect(
        etcd, job=job, nodes=(1, 2), last_call_timeout=60, rank_key="a"
    ) as group:
        rdzv_etcd.torch.run(group, train, backend="gloo", over_within_s=LIMIT_S)
    return sizes


class Counted:
    """A step counter as a part of the state."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def parallel_training(etcd: str, job: str, progress: Path, stop: Path) -> dict[str, Any]:
    """DistributedDataParallel in each world anew, until the stop file is there."""
    model, counted = nn.Linear(8, 1), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rdzv_etcd.connect(etcd, job=job, nodes=(2, 3), last_call_timeout=60) as group:

        def train(world: World) -> None:
            rdzv_etcd.torch.broadcast_newest(world, counted.step, model, optimizer, counted)
            parallel = DistributedDataParallel(model)
            while not world.over:
                stopping = torch.tensor([int(stop.exists())])
                dist.all_reduce(stopping)
                if stopping.item():
                    world.barrier("done")
                    return end(group)
                optimizer.zero_grad()
                parallel(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                counted.step += 1
                progress.write_text(f"{world.rank} {world.size} {counted.step}\n")
            return None

        rdzv_etcd.torch.run(group, train, backend="gloo")
    return {"step": counted.step, "parameters": [p.tolist() for p in model.parameters()]}


def end(group: Group) -> None:
    group.finish()


def interrupted_while_connecting(_etcd: str, _job: str) -> bool:
    """A signal is raised in the wait for gloo; tells whether what gloo did then went on."""
    # It is ignored where the tests run in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = threading.Event()

    def waits() -> bool:
        return sys._current_frames()[threading.main_thread().ident or 0].f_code is _WAIT

    def make() -> None:
        while not waits():
            time.sleep(0.01)
        # It does not interrupt the wait of the main thread, in which Python raises it.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        interrupted.wait()

    try:
        AbandonableCalls().run(make)
    except KeyboardInterrupt:
        interrupted.set()
    for thread in threading.enumerate():
        if thread.name == LEFT_BEHIND:
            thread.join()
    return interrupted.is_set()
