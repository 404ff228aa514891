"""Drains and gates on a real etcd, on both faces of the library."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd import Left
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import DrainedError, GateError, SettingsError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.node.leave import request_drain
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Connection, parse_endpoints
from rdzv_etcd.settings.fields import gate_words
from rdzv_etcd.settings.parse import WITHHELD
from rdzv_etcd.world.group import Group
from tests.library.nodes import ALONE, LIMIT_S, Job, at_once, join_all, wait_until

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


def work(group: Group, stops: list[bool]) -> None:
    """A loop that stops at its commit points only."""
    for world in group.worlds():
        while not world.should_yield:
            time.sleep(0.02)
        stops.append(world.over)


# --- drains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["itself", "an operator"])
def test_a_drained_node_s_loop_ends_and_the_others_continue(job: Job, who: str) -> None:
    with job.worlds(3, "2:3", lease_ttl=LONG_S) as (nodes, worlds):
        drained, others = nodes[0], nodes[1:]
        if who == "itself":
            drained.drain("its fan is loud")
            drained.drain("again")
        else:
            assert asyncio.run(_ask(job, drained.node_id))
        wait_until("all may stop", lambda: all(world.should_yield for world in worlds))
        assert not any(world.over for world in worlds)
        by = "" if who == "itself" else " by an operator"
        assert drained.drain_reason == f"drained{by}: its fan is loud"
        assert list(drained.worlds()) == []
        assert drained.has_left
        with pytest.raises(DrainedError, match="its fan is loud") as raised:
            drained.join()
        assert raised.value.reason == "its fan is loud"
        for world in worlds[1:]:
            assert world.wait_over(LIMIT_S)
            assert world.change == Left({drained.node_id: f"drained{by}: its fan is loud"})
        again = join_all(others)
        assert [world.size for world in again] == [2, 2]
        assert not any(world.should_yield for world in again)
    assert not job.left()


async def _ask(job: Job, node_id: str) -> bool:
    etcd = EtcdClient(Connection(parse_endpoints(job.server.endpoint).endpoints))
    try:
        keys = JobKeys("/rdzv_etcd", job.id)
        return await request_drain(etcd, keys, SystemClock(), node_id, "its fan is loud")
    finally:
        await etcd.close()


# --- gates ----------------------------------------------------------------------------------------


def test_a_gate_is_asked_before_each_arrival_and_gets_to_know_why(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, gate = tmp_path / "asked", tmp_path / "gate.sh"
    for secret in WITHHELD:
        monkeypatch.setenv(secret, "a secret of sixteen")
    names = ("ROUND", "JOB_ID", "NODE_ID", "LAST_CHANGE", "PASSWORD", "EMBED_SECRET")
    gate.write_text(
        f'#!/bin/sh\necho "{"|".join("$RDZV_ETCD_" + name for name in names)}" >> {asked}\n'
        f"[ $(wc -l < {asked}) != 2 ] || {{ echo 2 of 8 GPUs answer; exit 3; }}\n"
    )
    gate.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = job.settings("1:2", lease_ttl=LONG_S, **ALONE)
    with (
        Group(job.settings("1:2", lease_ttl=LONG_S, gate_command=gate.name, **ALONE)) as group,
        Group(settings) as other,
    ):
        worlds = at_once([group.join, other.join])
        with pytest.raises(GateError, match="ended with exit code 3: 2 of 8 GPUs answer") as raised:
            group.join()
        assert raised.value.node == group.node_id
        assert (raised.value.exit_code, raised.value.output) == (3, "2 of 8 GPUs answer")
        assert worlds[1].wait_over(LIMIT_S)
        change = worlds[1].change
        assert isinstance(change, Left)  # at once, and not after rejoin_timeout
        assert "ended with exit code 3: 2 of 8 GPUs answer" in change.members[group.node_id]
        alone = other.join()
        assert alone.size == 1
        # Only once it is wanted: the gate may take longer than a round of one node.
        joining = at_once([group.join, lambda: alone.wait_over(LIMIT_S) and other.join()])
        assert [world.size for world in joining] == [2, 2]
        other.leave("SIGTERM")
        assert joining[0].wait_over(LIMIT_S)
        group.join()
    changes = ["", "", "", str(Left({other.node_id: "SIGTERM"}))]
    assert asked.read_text().splitlines() == [
        f"{number}|{job.id}|{group.node_id}|{change}||"
        for number, change in enumerate(changes, start=1)
    ]


@pytest.mark.parametrize("command", ["", "  ", "a 'b", "a\0b"])
def test_what_cannot_be_a_command_is_refused(command: str) -> None:
    with pytest.raises(SettingsError, match="gate_command"):
        gate_words(command)


def test_a_gate_on_asyncio_that_is_cancelled_ends(job: Job, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = f"sh -c 'touch {begun}; exec sleep 600'"

    async def main() -> None:
        async with rdzv_etcd.aio.Group(Group(job.settings(gate_command=command))) as group:
            joining = asyncio.ensure_future(group.join())
            await asyncio.to_thread(wait_until, "its gate is asked", begun.exists)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining

    began_s = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began_s < LIMIT_S / 2
