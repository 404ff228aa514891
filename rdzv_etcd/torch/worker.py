"""``connect_worker``: a worker of torchrun takes part in its job by itself (``in_process=1``).

Knows what the agent's handler has put into the environment, and how a worker and its agent leave
together.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rdzv_etcd import Group, World, settings_from_config
from rdzv_etcd.errors import (
    GateError,
    JobSettingsMismatchError,
    JoinTimeoutError,
    MisuseError,
    StateCorruptError,
)
from rdzv_etcd.process import IN_A_WORLD, has_default_action, tell_agent
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.parse import WORKER_VARIABLE

_STOPS = signal.SIGTERM
"""How torchrun's agent stops a worker; after 30 s it kills it."""
_DRAINS = signal.SIGUSR1


def connect_worker(*, data: Mapping[str, object] | None = None, epoch_floor: int = 0) -> Group:
    """Take part in the job that torchrun has started this process for, as :func:`rdzv_etcd.connect`
    does elsewhere: endpoints, job and options are those of torchrun's command line.

    For workers of ``torchrun --rdzv-backend=etcd3 --rdzv-conf=in_process=1``. Each is a node of the
    job, of which there are ``--nnodes`` times ``--nproc-per-node``; those of one host have
    contiguous ranks, and are in a world together or not at all. ``data`` and ``epoch_floor`` are as
    in ``connect``.

    Where nothing else handles these signals, ``SIGTERM``, by which the agent stops its workers, and
    ``SIGUSR1`` let this node leave at the next safe point (:meth:`rdzv_etcd.Group.drain`). A node
    that is drained takes its whole host with it: its agent stops the other workers, and ends.

    Blocks and raises as ``connect``, and raises :class:`~rdzv_etcd.errors.MisuseError` in a process
    that was not started like this.
    """
    text = os.environ.get(WORKER_VARIABLE)
    if text is None:
        raise MisuseError(
            "connect_worker() is for workers of torchrun --rdzv-backend=etcd3 "
            "--rdzv-conf=in_process=1, and this process is none; elsewhere use rdzv_etcd.connect()"
        )
    given: dict[str, Any] = json.loads(text)
    # torchrun counts the workers of one agent only; and LOCAL_RANK may be 0 in all of them.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fewest, most = given["hosts"]
    group = _Worker(
        tuple(given["agent"]["news"]),
        settings_from_config(
            endpoint=given["endpoint"],
            job_id=given["job"],
            min_nodes=fewest * size,
            max_nodes=most * size,
            local_addr=given["local_addr"],
            config=_options(given, rank, size),
            environ=os.environ,
            data=data,
            epoch_floor=epoch_floor,
        ),
    )
    _leave_with_agent(group, given["agent"]["pid"])
    return group


class _Worker(Group):
    """Tells its agent whether it can take part."""

    def __init__(self, agent: tuple[str, int], settings: Settings) -> None:
        self._agent = agent
        self._told = ""
        super().__init__(settings)

    async def _join(self, thread: int, limit_s: float | None, because: str) -> World:
        self._tell("")
        try:
            world = await super()._join(thread, limit_s, because)
        except (GateError, JobSettingsMismatchError, JoinTimeoutError, StateCorruptError) as error:
            self._tell(f"{error}")
            raise
        self._tell(IN_A_WORLD)
        return world

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._told = line
            tell_agent(self._agent, line)


def _options(given: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a worker's options: the workers of a host are a segment, so that it joins as a whole;
    a rank key orders the hosts."""
    options: dict[str, Any] = dict(given["options"])
    host = " ".join(filter(None, (given["rank_key"], given["agent"]["node"])))
    if size > 1:
        options |= {"domain_key": f"value:{host}", "segment_size": size, "rank_key": str(rank)}
    elif given["rank_key"]:
        options["rank_key"] = f"value:{given['rank_key']}"
    if port := int(options.get("metrics_port", 0)):
        options["metrics_port"] = port + rank
    return options


def _leave_with_agent(group: Group, agent: int | None) -> None:
    """Drain the node when the agent stops this worker; when it has left because it was drained in
    another way, drain the agent (of that process id; ``None``: it cannot be)."""
    node = weakref.ref(group)  # a group that nothing refers to leaves
    is_stopped = threading.Event()

    def drain(number: int, _: FrameType | None) -> None:
        if number == _STOPS:
            is_stopped.set()
        group = node()
        if group is None or group.has_left:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            group.drain(signal.Signals(number).name)

    def drain_agent() -> None:
        group = node()
        drained = group is not None and group.drain_reason is not None and not is_stopped.is_set()
        if drained and agent is not None and os.getppid() == agent:
            os.kill(agent, _DRAINS)

    if threading.current_thread() is threading.main_thread():
        for number in (_STOPS, _DRAINS):
            if has_default_action(number):
                signal.signal(number, drain)
    group.when_left(drain_agent)
