"""etcd is restored from an older snapshot, as operators do it, while nodes work."""

from __future__ import annotations

import json

import pytest

from tests.faults.nodes import TTL_S
from tests.faults.servers import Job
from tests.support.leaks import job_root
from tests.support.servers import EtcdServer

pytestmark = [pytest.mark.every_etcd, pytest.mark.slow]


@pytest.mark.parametrize(
    "way", ["snapshot", pytest.param("data folder", marks=pytest.mark.release)]
)
def test_members_put_their_later_world_over_an_older_one(
    etcd: EtcdServer, job: Job, way: str
) -> None:
    """No node is disturbed; one that left after the snapshot gets no seat; epochs still grow."""
    nodes = job(etcd.endpoint, "2:4")
    gone, *pair = nodes.start("gone", "a", "b")
    nodes.wait_for_world([gone, *pair])
    if way == "snapshot":
        etcd.save_snapshot()
    else:
        etcd.save()
    gone.terminate()
    gone.wait()
    nodes.wait_for_world(pair)
    three = [*pair, *nodes.start("c")]
    world = nodes.wait_for_world(three)
    before = [len(node.entries()) for node in three]
    if way == "snapshot":
        etcd.restore_snapshot()
    else:
        etcd.restore()

    key = job_root(nodes.job_id) + b"ctl/round"
    nodes.wait_until(
        "the later world is put back",
        lambda: json.loads(etcd.keys(key).get(key, b"{}")).get("epoch") == world.epoch,
    )
    nodes.wait_present(etcd.gateway, three)  # what came back of others runs out
    nodes.stay_undisturbed(three, TTL_S)
    nodes.assert_undisturbed(three, before)

    four = [*three, *nodes.start("late")]
    later = nodes.wait_for_world(four)
    assert later.epoch > world.epoch
    assert (later.run, later.round) != (world.run, world.round)
    assert later.members[0] == world.members[0]
    nodes.finish(etcd.gateway)
