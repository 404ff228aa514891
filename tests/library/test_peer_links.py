"""Members that watch each other, with a real etcd and real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from rdzv_etcd import Group, Lost, World
from rdzv_etcd.peers import Answer
from rdzv_etcd.peers.tcp import TcpPeers
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.world_change import PROCESS_EXITED
from tests.library.nodes import LIMIT_S, Job, at_once, groups, join_all, wait_until

LONG_LEASE: dict[str, Any] = {"lease_ttl": 15, "peer_links": True}
"""So long that a loss that is known earlier has not waited for its end."""


def watched_by(group: Group) -> set[str]:
    """The node ids to which a group has links that were answered."""
    network = group._part.network
    assert isinstance(network, TcpPeers)
    return {link._peer.node_id for link in tuple(network._links) if link._answered.done()}


@pytest.fixture
def killed(job: Job) -> Iterator[Callable[[], tuple[str, list[Group], list[World]]]]:
    """Forms a world of two nodes here and one elsewhere, which is killed once it is watched."""
    job.leaks.timeout_s = 45.0  # the lease of the killed node
    with ExitStack() as stack:

        def form_and_kill() -> tuple[str, list[Group], list[World]]:
            remote = job.remote("2:3", **LONG_LEASE)
            stack.callback(remote.process.wait)
            stack.callback(remote.process.kill)
            for pipe in (remote.process.stdin, remote.process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
            settings = job.settings("2:3", **LONG_LEASE)
            here = stack.enter_context(groups(settings, 2))
            assert remote.node_id
            _, *worlds = at_once([partial(remote.call, "join"), *[group.join for group in here]])
            wait_until(
                "the remote node is watched",
                lambda: any(remote.node_id in watched_by(group) for group in here),
            )
            remote.process.kill()
            return remote.node_id, here, worlds

        yield form_and_kill


@pytest.mark.slow  # what the killed node held goes with its lease
def test_a_killed_process_is_known_long_before_its_lease_expires(killed: Any) -> None:
    victim, here, worlds = killed()
    for world in worlds:
        assert world.wait_over(LIMIT_S / 2)
        assert isinstance(world.change, Lost)
        assert world.change.members[victim].startswith(f"{PROCESS_EXITED} ({Answer.REFUSED.value}")
    again = join_all(here)
    assert {world.size for world in again} == {2}


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
