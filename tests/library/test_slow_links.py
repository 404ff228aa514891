"""A world whose members reach etcd over slow links to several endpoints."""

from __future__ import annotations

from functools import partial

from tests.library.nodes import LIMIT_S, Job, at_once, groups, join_all, node_settings
from tests.support.bridge import FaultBridge


def test_members_exchange_more_than_an_attempt_carries(job: Job) -> None:
    """All values at once take longer than a read may take at one endpoint while there are others,
    however often it is tried; each takes a second."""
    address = job.server.address
    with FaultBridge(address) as one, FaultBridge(address) as two:
        settings = node_settings(f"{one.target},{two.target}", job.id, "4", lease_ttl=10)
        with groups(settings, 4) as nodes:
            worlds = join_all(nodes)
            for way in (one, two):
                way.shape(bytes_per_s=1_200_000)
            values = [bytes([world.rank]) * 1_200_000 for world in worlds]
            calls = [
                partial(world.exchange, value, LIMIT_S)
                for world, value in zip(worlds, values, strict=True)
            ]
            assert at_once(calls) == [sorted(values)] * 4
            for way in (one, two):
                way.shape()
