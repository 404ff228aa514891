"""What cannot be handed to another process, and what can."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import aio
from tests.library.nodes import LIMIT_S, Job


@pytest.fixture
def things(job: Job) -> Iterator[list[Any]]:
    """One of each, and its twin for asyncio."""
    local: dict[str, Any] = {"local_addr": "127.0.0.1", "ended_ttl": 5}
    endpoint = job.server.endpoint
    with ExitStack() as stack:
        group = stack.enter_context(
            rdzv_etcd.connect(endpoint, job=job.id, nodes=1, data={"gpus": 8}, **local)
        )
        world = group.join()
        observer = stack.enter_context(rdzv_etcd.observe(endpoint, job=job.id))
        events = stack.enter_context(observer.events())
        twin = aio.Group(group)
        its_world = aio.World(twin, world._part, world._seat)
        yield [
            *(group, world, world.store, observer, events),
            *(twin, its_world, its_world.store, aio.Observer(observer), twin.events()),
        ]


def test_a_part_of_this_process_cannot_be_handed_to_another(things: list[Any]) -> None:
    for thing in things:
        with pytest.raises((TypeError, NotImplementedError)):
            pickle.dumps(thing)


def test_what_is_a_plain_value_can_be_handed_over(things: list[Any]) -> None:
    group, world, _, observer, events = things[:5]
    values = [
        *(world.master, world.members, world.node_ids),
        *(observer.state(), events.next(LIMIT_S)),
    ]
    group.finish("done")
    assert world.wait_over(LIMIT_S)
    values += [world.change, group.closure()]
    for value in values:
        assert value is not None
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
