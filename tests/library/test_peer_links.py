"""Members that watch each other, with a real etcd and real processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rdzv_etcd import Group, Lost
from rdzv_etcd.peers import Answer
from rdzv_etcd.peers.tcp import TcpPeers
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.world_change import PROCESS_EXITED
from tests.library.nodes import LIMIT_S, Job, at_once, join_all, wait_until

LONG_LEASE: dict[str, Any] = {"lease_ttl": 15, "peer_links": True}
"""So long that a loss that is known earlier has not waited for its end."""


def watched_by(group: Group) -> set[str]:
    """The node ids to which a group has links that were answered."""
    network = group._part.network
    assert isinstance(network, TcpPeers)
    return {link._peer.node_id for link in tuple(network._links) if link._answered.done()}


def test_a_killed_process_is_known_long_before_its_lease_expires(job: Job) -> None:
    with job.remote("2:3", **LONG_LEASE) as victim, job.groups(2, "2:3", **LONG_LEASE) as here:
        assert victim.node_id
        _, *worlds = at_once([partial(victim.call, "join"), *[group.join for group in here]])
        wait_until("it is watched", lambda: any(victim.node_id in watched_by(one) for one in here))
        victim.process.kill()
        for world in worlds:
            assert world.wait_over(LIMIT_S / 2)
            assert isinstance(world.change, Lost)
            how = world.change.members[victim.node_id]
            assert how.startswith(f"{PROCESS_EXITED} ({Answer.REFUSED.value}")
        assert {world.size for world in join_all(here)} == {2}
    job.end_leases()


def test_members_that_leave_are_not_taken_for_dead(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with job.groups(3, "1:3", **LONG_LEASE) as nodes:
        join_all(nodes)
        wait_until("all are watched", lambda: all(watched_by(node) for node in nodes))
        nodes[1].leave("has to go")
        worlds = join_all([nodes[0], nodes[2]])
        assert {world.size for world in worlds} == {2}
    assert not [line for line in caplog.messages if PROCESS_EXITED in line]


def test_nothing_of_the_links_is_there_without_them(job: Job) -> None:
    with job.group(peer_links=False) as group:
        group.join()
        assert group._part.network is None
        keys = JobKeys("/rdzv_etcd", job.id)
        written = job.server.keys(keys.root)  # others' tests have left jobs of their own
        assert keys.node(group.node_id) in written
        assert b"peer_port" not in b"".join(written.values())
