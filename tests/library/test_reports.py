"""A program reports a member dead, on a real etcd and with real processes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import Lost
from rdzv_etcd.errors import MisuseError
from tests.library.nodes import LIMIT_S, Job, at_once, join_all


def test_a_killed_process_that_is_reported_is_known_long_before_its_lease_expires(job: Job) -> None:
    given: dict[str, Any] = {"lease_ttl": 15, "peer_links": False}
    with job.remote("2:3", **given) as remote, job.groups(2, "2:3", **given) as nodes:
        assert remote.node_id
        _, *worlds = at_once([partial(remote.call, "join"), *[node.join for node in nodes]])
        (dead,) = [one for one in worlds[0].members if one.node_id == remote.node_id]
        remote.process.kill()
        assert nodes[0].report_dead(dead, "its process has ended", certain=True)
        for world in worlds:
            assert world.wait_over(LIMIT_S)
            assert isinstance(world.change, Lost)
            how = world.change.members[dead.node_id]
            assert how.startswith("reported dead: its process has ended (by ")
        assert {world.size for world in join_all(nodes)} == {2}
    job.end_leases()


@pytest.mark.parametrize("peer_links", [True, False], ids=["links", ""])
def test_a_wrong_report_restarts_nobody(
    job: Job, peer_links: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"lease_ttl": 3, "peer_links": peer_links}
    with job.worlds(3, **given) as (nodes, worlds):
        one = rdzv_etcd.aio.Group(nodes[0])
        reported = one.report_dead(nodes[1].node_id, "no heartbeat", certain=True)
        assert asyncio.run(reported)
        assert not nodes[0].report_dead(nodes[1].node_id, "no heartbeat")
        with pytest.raises(MisuseError, match="reports itself dead"):
            nodes[0].report_dead(nodes[0].node_id, "I am")
        at_once([partial(world.barrier, "all live", LIMIT_S) for world in worlds])
        assert not any(world.over for world in worlds)
    assert "reported this node dead" in caplog.text
