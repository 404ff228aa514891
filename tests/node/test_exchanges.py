"""What the members of a world give each other outlives etcd's data. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.protocol.keys import CollectiveKeys, KeyRange
from rdzv_etcd.world.collectives import Collectives
from tests.sim.commits import OPERATOR
from tests.sim.world import SimJob, SimNode, Snapshot, simulated

LOSSES = pytest.mark.parametrize(
    "loss", ["restored", "restored and bumped", "overtaken", "wiped", "lease"]
)


class Members:
    """The members of a world of three, and their exchanges."""

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.nodes = job.start_all("abc")
        self._collectives: dict[str, Collectives] = {}

    def give(self, node: SimNode, data: bytes) -> asyncio.Task[list[bytes]]:
        if node.name not in self._collectives:
            assert node.world is not None
            self._collectives[node.name] = Collectives(node.node, node.world)
        return self.job.on(node, self._collectives[node.name].exchange(data, 60))

    async def all_take(self, data: bytes) -> None:
        taken = await asyncio.gather(*(self.give(node, data) for node in self.nodes))
        assert taken == [[data] * 3] * 3
        assert all(node.joins == 1 for node in self.nodes), self.job.tell()

    def given(self) -> KeyRange:
        """Where etcd keeps what they give."""
        world = self.nodes[0].world
        assert world is not None
        return CollectiveKeys.of_exchange(self.job.keys, world.round, world.epoch).range

    def kept(self, given: KeyRange) -> int:
        """How many values etcd keeps there."""
        return sum(kv.key in given and b"/given/" in kv.key for kv in self.job.server.snapshot())

    def lose(self, loss: str, before: Snapshot) -> None:
        """Let etcd lose what was written since; or all; or only what is on the job's lease."""
        if loss == "wiped":
            self.job.wipe()
        elif loss == "lease":
            self.job.server.expire(self.job.history.formed[0].record.job_lease)
        else:
            self.job.restore(before, bump_revision=1000 if "bumped" in loss else 0)
        if loss == "overtaken":
            for number in range(50):
                self.job.server.apply(Txn((), (Put(b"/others", b"%d" % number),)), OPERATOR)


@LOSSES
@pytest.mark.parametrize("turns_before", [0, 1, 3])
@simulated(min_nodes=3, max_nodes=3)
async def test_what_etcd_forgets_before_one_has_taken_it_is_given_again(
    job: SimJob, loss: str, turns_before: int
) -> None:
    """By those who have, although they do not call again."""
    members = Members(job)
    await job.until_works("abc")
    for _ in range(turns_before):
        await members.all_take(b"before")
    before = job.save()
    late, *others = members.nodes
    waiting = members.give(late, b"now")
    await job.pass_time(1)
    late.connection.link.lag_watches(5.0)
    await asyncio.gather(*(members.give(node, b"now") for node in others))
    assert not waiting.done()
    members.lose(loss, before)
    assert await waiting == [b"now"] * 3
    await members.all_take(b"next")


@LOSSES
@simulated(min_nodes=3, max_nodes=3)
async def test_what_etcd_forgets_while_its_giver_waits_is_given_again(
    job: SimJob, loss: str
) -> None:
    members = Members(job)
    await job.until_works("abc")
    before = job.save()
    early, *others = members.nodes
    waiting = members.give(early, b"now")
    await job.pass_time(1)
    members.lose(loss, before)
    await job.pass_time(10)
    assert not waiting.done()
    await asyncio.gather(*(members.give(node, b"now") for node in others))
    assert await waiting == [b"now"] * 3
    for _ in range(3):
        await members.all_take(b"next")
    assert members.kept(members.given()) == 6
