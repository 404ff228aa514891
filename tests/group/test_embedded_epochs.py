"""Epochs of jobs whose etcd is new in every run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.group.context import Identity
from rdzv_etcd.group.node import Node
from rdzv_etcd.settings import JobSettings, Settings
from rdzv_etcd.testing import MemoryEtcd

ALONE = Settings("job", JobSettings(1, 1))


async def _epochs(settings: Settings) -> list[int]:
    """Return the epochs of two rounds on an etcd of their own."""
    async with MemoryEtcd() as server:
        node = Node(server.connect(), settings, Identity("host~1~a", "run"), SystemClock())
        epochs = [(await node.join("192.0.2.1", 1, 60.0)).epoch for _ in range(2)]
        await node.leave("the test is over")
        return epochs


def test_an_embedded_etcd_s_epochs_go_on_where_the_last_run_s_ended() -> None:
    """Otherwise the checkpoints of the last run would look newer than those of this one."""
    embedded = replace(ALONE, embed=True)
    epochs = [*asyncio.run(_epochs(embedded)), *asyncio.run(_epochs(embedded))]
    assert epochs == sorted(set(epochs))


def test_other_epochs_are_etcd_s_revisions() -> None:
    assert all(epoch < 100 for epoch in asyncio.run(_epochs(ALONE)))
