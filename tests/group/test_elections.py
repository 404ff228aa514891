"""Named leadership in virtual time: who leads, what of it is known, and what its fence is worth.

Whatever a leader writes goes to a disk that refuses what has a lower fence than it has seen: that
is what the fence is for, and it is looked at in every scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from rdzv_etcd.core.elections import Fence
from rdzv_etcd.core.model import Closure
from rdzv_etcd.errors import (
    ElectionTimeoutError,
    JobClosedError,
    MisuseError,
    StateCorruptError,
    WorldOverError,
)
from rdzv_etcd.etcd.api import Put, Txn
from rdzv_etcd.group.elections import Elections, Term
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.schema.keys import OfficeKeys
from tests.sim.matching import puts
from tests.sim.world import TTL_S, SimJob, SimNode, simulate

SOON_S = 1.0


class Disk:
    """Takes what has no lower fence than the highest it has seen, and remembers whose that is."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Fence]] = []
        self.refused: list[tuple[str, Fence]] = []

    def write(self, who: str, fence: Fence) -> None:
        """Let a leader write; no two ever share a fence."""
        owner = {fence: name for name, fence in self.written}.get(fence, who)
        assert owner == who, f"{owner} and {who} have the same fence {fence}"
        is_old = bool(self.written) and fence < self.written[-1][1]
        (self.refused if is_old else self.written).append((who, fence))


class Candidate:
    """A member that is elected again and again."""

    def __init__(self, job: SimJob, node: SimNode) -> None:
        assert node.world is not None
        self.job = job
        self.node = node
        self.elections = Elections(node.node, node.world)
        self.term: Term | None = None

    @property
    def holds(self) -> bool:
        return self.node.alive and self.term is not None and self.term.is_held

    async def elect(self, timeout_s: float | None = None) -> Term:
        """As part of its node."""
        work = self.job.on(self.node, self.elections.elect("writer", timeout_s))
        try:
            term: Term = await work
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        self.term = term
        return term

    async def campaign(self, disk: Disk, holds_s: float) -> None:
        """Lead, write for a while, resign, and stand again; in world after world."""
        while True:
            if self.node.world is not None:
                self.elections = Elections(self.node.node, self.node.world)
                with contextlib.suppress(WorldOverError):
                    await self._campaign(disk, holds_s)
            await asyncio.sleep(0.05)

    async def _campaign(self, disk: Disk, holds_s: float) -> None:
        while True:
            term = self.term = await self.elections.elect("writer", None)
            until_s = self.job.loop.time() + holds_s
            while term.is_held and self.job.loop.time() < until_s:
                disk.write(self.node.name, term.fence)
                await asyncio.sleep(0.05)
            await term.resign()


async def candidates(job: SimJob, names: str) -> list[Candidate]:
    job.start_all(names)
    await job.until_works(names)
    return [Candidate(job, job.nodes[name]) for name in names]


def sole(found: list[Candidate]) -> Candidate:
    (holder,) = [each for each in found if each.holds]
    return holder


def test_they_lead_in_the_order_in_which_they_came_each_above_the_one_before() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "abc")
        order = job.loop.rng.sample(found, 3)
        works = []
        for each in order:
            works.append(asyncio.ensure_future(each.elect()))
            await job.pass_time(0.1)
        fences = []
        for each, work in zip(order, works, strict=True):
            term = await work
            assert sole(found) is each
            assert await each.elections.leader("writer") == each.node.node_id
            fences.append(term.fence)
            await term.resign()
            assert not term.is_held
        assert fences == sorted(set(fences))
        assert await found[0].elections.leader("writer") is None

    simulate(scenario, min_nodes=3, max_nodes=3)


def test_one_waiter_is_told_when_a_leader_resigns() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "abcd")
        first = await found[0].elect()
        works = []
        for each in found[1:]:
            works.append(asyncio.ensure_future(each.elect()))
            await job.pass_time(0.2)
        reads = job.server.requests["Get"]
        await first.resign()
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        assert sole(found) is found[1]
        assert job.server.requests["Get"] - reads <= 3
        for work in works[1:]:
            work.cancel()
        await asyncio.wait(works)

    simulate(scenario, range(5), min_nodes=4, max_nodes=4)


@pytest.mark.parametrize("revokes", [False, True], ids=["", "sessions revoked"])
def test_no_two_lead_at_the_same_time_whatever_happens(revokes: bool) -> None:
    """Cuts, and requests that hang, whose answers are lost, or that come twice: at every moment at
    most one believes that it leads. Whose session etcd revokes though it was renewed hears of that
    a little late, when another may lead; they share no fence, and the disk tells them apart.
    """

    async def scenario(job: SimJob) -> None:
        found, disk, rng = await candidates(job, "abc"), Disk(), job.loop.rng
        works = [job.on(each.node, each.campaign(disk, rng.uniform(0.2, 5.0))) for each in found]
        until_s = job.loop.time() + 120.0
        while job.loop.time() < until_s:
            await trouble(job, rng.choice(found).node, revokes=revokes)
            for _ in range(rng.randrange(40)):
                believe = len([each for each in found if each.holds])
                assert believe <= (len(found) if revokes else 1), job.tell()
                await asyncio.sleep(0.05)
        led = len(disk.written)
        await job.until(lambda: len(disk.written) > led, "somebody leads again", 60.0)
        assert len({fence for _, fence in disk.written}) > 5
        if not revokes:
            assert disk.refused == []
        for work in works:
            work.cancel()
        await asyncio.wait(works)

    simulate(scenario, min_nodes=1, max_nodes=3)


async def trouble(job: SimJob, node: SimNode, *, revokes: bool) -> None:
    link, rng = node.connection.link, job.loop.rng
    kind = rng.randrange(4 + revokes)
    if kind == 0:
        link.partition()
        await job.pass_time(rng.uniform(0.1, 3.0))
        link.heal()
    elif kind == 1:
        link.drop_replies(1)
    elif kind == 2:
        link.repeat_requests(rng.uniform(0.1, 2.0), 2)
    elif kind == 3:
        link.delay(0.0, rng.uniform(0.001, 0.3))
    elif node.node.context.session.lease_id:
        job.revoke([node.node.context.session.lease_id])


def test_a_leader_whose_session_was_lost_does_not_lead_again_by_itself() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term = await found[0].elect()
        job.revoke([found[0].node.node.context.session.lease_id])
        await job.on(found[0].node, term.lost())
        await job.pass_time(2 * TTL_S)
        assert found[0].node.is_working
        assert not term.is_held
        again = await found[0].elect()
        assert again.fence > term.fence

    simulate(scenario, range(5), min_nodes=2, max_nodes=2)


def test_a_lost_session_is_enough_to_know_it() -> None:
    """The keep-alive tells before the watch does."""

    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term, session = await found[0].elect(), found[0].node.node.context.session
        lease = session.lease_id
        found[0].node.connection.link.lag_watches(30.0)
        job.revoke([lease])
        await job.until(lambda: session.lease_id not in (0, lease), "a new session", TTL_S)
        assert not term.is_held

    simulate(scenario, range(3), min_nodes=2, max_nodes=2)


def test_a_leader_that_is_cut_off_does_not_believe_for_longer_than_its_lease_lasts() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        first = await found[0].elect()
        waits = asyncio.ensure_future(found[1].elect())
        await job.pass_time(1.0)
        found[0].node.connection.link.partition(silent=True)
        began_s = job.loop.time()
        await job.until(lambda: not first.is_held, "it gives up to believe", 2 * TTL_S)
        assert job.loop.time() - began_s <= TTL_S
        # Its lease runs out, which ends the world: if the other leads before, then not for long.
        (after,) = await asyncio.gather(waits, return_exceptions=True)
        if isinstance(after, Term):
            assert after.fence > first.fence
            await job.until(lambda: not after.is_held, "the world is over", TTL_S)
        else:
            assert isinstance(after, WorldOverError)

    simulate(scenario, range(5), min_nodes=1, max_nodes=2)


def test_a_leader_that_was_stopped_and_wakes_up_does_not_believe_that_it_leads() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term = await found[0].elect()
        job.pause("a")
        await job.pass_time(TTL_S + 2.0)
        assert not term.is_held
        job.resume("a")
        assert not term.is_held

    simulate(scenario, range(5), min_nodes=1, max_nodes=2)


def test_etcd_refuses_what_a_leader_of_before_writes() -> None:
    """Its write was on its way when its session was lost, and comes after the next one's."""

    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        (old, new) = found
        stores = [store_of(job, each) for each in found]
        term = await old.elect()
        assert await stores[0].set_while(term.guard, "state", b"old 1", 60.0)
        old.node.connection.link.hold_requests(5.0, 1, puts(stores[0]._keys.value("state")))
        late = job.on(old.node, stores[0].set_while(term.guard, "state", b"old 2", 60.0))
        await job.pass_time(0.5)
        job.revoke([old.node.node.context.session.lease_id])
        later = await new.elect(1.0)
        assert await stores[1].set_while(later.guard, "state", b"new", 60.0)
        assert await late is False
        assert await stores[1].get("state", 1.0) == b"new"

    simulate(scenario, range(5), min_nodes=2, max_nodes=2)


def store_of(job: SimJob, candidate: Candidate) -> KeyValueStore:
    node, seat = candidate.node, candidate.elections._seat
    keys, clock = job.keys.store(seat.round, seat.run), node.node.context.clock
    return KeyValueStore(node.connection, keys, seat.job_lease, writer=node.node_id, clock=clock)


def test_the_fence_grows_from_world_to_world() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term = await found[0].elect()
        waits = asyncio.ensure_future(found[1].elect())
        job.start("c")
        with pytest.raises(WorldOverError):
            await waits
        await job.until_works("abc")
        assert not term.is_held
        later = await Candidate(job, job.nodes["c"]).elect()
        assert later.fence > term.fence
        await job.pass_time(1.0)
        await job.leave("c")
        await job.until_works("ab")
        await (await Candidate(job, job.nodes["a"]).elect()).resign()
        left = [kv.key for kv in job.server.snapshot(job.keys.offices.start)]
        assert all(key.startswith(job.keys.offices.start + b"000000000") for key in left)
        assert not [key for key in left if b"0000000001/" in key]  # swept with its round

    simulate(scenario, range(5), min_nodes=2, max_nodes=3)


@pytest.mark.parametrize("wiped", [True, False], ids=["wiped", "restored"])
def test_the_fence_grows_in_a_world_whose_etcd_has_gone_back(wiped: bool) -> None:
    """Those who have led are still there, or the world would be over."""

    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        saved = job.save()
        write_much(job)
        term = await found[0].elect()
        if job.loop.rng.random() < 0.5:
            await term.resign()
        if wiped:
            job.wipe()
        else:
            job.restore(saved)
        await job.pass_time(3 * TTL_S)
        assert job.works("ab"), job.tell()
        assert not term.is_held
        later = await found[1].elect(60.0)
        assert later.fence.epoch == term.fence.epoch
        assert later.fence > term.fence
        await later.resign()
        last = await found[0].elect(60.0)
        assert last.fence > later.fence

    simulate(scenario, min_nodes=2, max_nodes=2)


def write_much(job: SimJob) -> None:
    """Others use the same etcd."""
    for _ in range(300):
        job.server.apply(Txn((), (Put(b"another/key", b""),)))


def test_who_runs_out_of_time_is_told_who_leads_and_stands_no_longer() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term = await found[0].elect()
        with pytest.raises(ElectionTimeoutError, match="not had within 3 s: a leads") as caught:
            await found[1].elect(3.0)
        assert caught.value.leader == found[0].node.node_id
        await term.resign()
        await job.pass_time(1.0)
        assert await found[0].elections.leader("writer") is None
        assert await found[1].elect(3.0)

    simulate(scenario, range(5), min_nodes=2, max_nodes=2)


def test_a_call_that_is_cancelled_lets_the_next_one_lead() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        works = [asyncio.ensure_future(each.elect()) for each in found]
        await job.pass_time(job.loop.rng.uniform(0.0, 0.02))
        works[0].cancel()
        await asyncio.wait({works[0]})
        if not works[0].cancelled():
            await works[0].result().resign()
        await works[1]
        assert sole(found) is found[1]

    simulate(scenario, min_nodes=2, max_nodes=2)


def test_a_request_to_stand_that_comes_late_lets_nobody_stand() -> None:
    """It was given up, was on its way, and is there after this member has ceased to stand."""

    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        key = OfficeKeys.of(job.keys, 1, found[0].elections._seat.epoch, "writer")
        match = puts(key.candidate(found[0].node.node_id))
        found[0].node.connection.link.hold_requests(4.0, 1, match)
        with pytest.raises(ElectionTimeoutError):
            await found[0].elect(1.0)
        await job.pass_time(10.0)
        assert await found[1].elections.leader("writer") is None
        assert await found[1].elect(1.0)

    simulate(scenario, range(5), min_nodes=2, max_nodes=2)


def test_it_ends_with_the_job() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        term = await found[0].elect()
        waits = asyncio.ensure_future(found[1].elect())
        await job.pass_time(1.0)
        await job.nodes["a"].node.close_job(succeeded=True, reason="done")
        with pytest.raises(JobClosedError, match="done"):
            await waits
        assert not term.is_held
        assert isinstance(found[0].node.node.closure(), Closure)

    simulate(scenario, range(3), min_nodes=2, max_nodes=2)


def test_who_leads_or_waits_already_is_told_so() -> None:
    async def scenario(job: SimJob) -> None:
        (one, other) = await candidates(job, "ab")
        await one.elect()
        waits = asyncio.ensure_future(other.elect())
        await job.pass_time(1.0)
        for each in (one, other):
            with pytest.raises(MisuseError, match="holds the leadership 'writer', or waits for it"):
                await each.elections.elect("writer", None)
        await one.elections.elect("another", 1.0)
        for name in (None, "x" * 1001):
            with pytest.raises(MisuseError, match="leadership's name"):
                await one.elections.elect(name, 1.0)  # type: ignore[arg-type]
        waits.cancel()
        await asyncio.wait({waits})

    simulate(scenario, range(3), min_nodes=2, max_nodes=2)


def test_what_others_write_there_is_named() -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        keys = OfficeKeys.of(job.keys, 1, found[0].elections._seat.epoch, "writer")
        job.server.apply(Txn((), (Put(keys.candidate("stranger"), b"mine"),)))
        with pytest.raises(StateCorruptError, match="stranger"):
            await found[0].elect(1.0)
        with pytest.raises(StateCorruptError, match="stranger"):
            await found[0].elections.leader("writer")

    simulate(scenario, range(3), min_nodes=2, max_nodes=2)


def test_a_long_wait_is_told_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(job: SimJob) -> None:
        found = await candidates(job, "ab")
        await found[0].elect()
        with pytest.raises(ElectionTimeoutError):
            await found[1].elect(400.0)

    simulate(scenario, range(1), min_nodes=2, max_nodes=2)
    told = re.findall(r"waiting (\d+) s for the leadership 'writer': a leads", caplog.text)
    assert told == ["10", "30", "60", "360"]
