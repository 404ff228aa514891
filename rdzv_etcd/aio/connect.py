"""Entering a job, or looking at one from outside, from asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rdzv_etcd.aio.group import Group, in_thread
from rdzv_etcd.aio.observer import Observer
from rdzv_etcd.log import show
from rdzv_etcd.node.gate import GateFunction
from rdzv_etcd.world import group as blocking
from rdzv_etcd.world import observer as blocking_observer
from rdzv_etcd.world.connect import (
    ConnectionOptions,
    Options,
    settings_for,
    settings_to_observe,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


async def connect(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    nodes: int | tuple[int, int],
    data: Mapping[str, object] | None = None,
    local_addr: str | None = None,
    epoch_floor: int = 0,
    gate: GateFunction | None = None,
    **options: Unpack[Options],
) -> Group:
    """As :func:`rdzv_etcd.connect`. If this is cancelled, the node leaves as soon as it has
    connected."""
    settings = settings_for(
        endpoints,
        options,
        job=job,
        nodes=nodes,
        data=data,
        local_addr=local_addr,
        epoch_floor=epoch_floor,
    )
    show(settings.log)
    make = partial(blocking.Group, settings, gate=gate)
    return Group(await in_thread(make, lambda group: group._part.drop()))


async def observe(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    **options: Unpack[ConnectionOptions],
) -> Observer:
    """As :func:`rdzv_etcd.observe`."""
    settings = settings_to_observe(endpoints, options, job=job)
    make = partial(blocking_observer.Observer, settings)
    return Observer(await in_thread(make, _close_observer))


def _close_observer(observer: blocking_observer.Observer) -> None:
    observer._part.begin_to_close()
