"""etcd goes back in time: restored from a snapshot, or started again from a member that lagged."""

from __future__ import annotations

from functools import partial

import pytest

from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.node import lead as leadership
from rdzv_etcd.node import node
from rdzv_etcd.protocol import lead as leading
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import encode_accusation
from rdzv_etcd.protocol.model import Accusation, Nodes
from tests.sim import world
from tests.sim.world import TTL_S, SimJob, SimNode, Snapshot, simulate, simulated

BUMPED = pytest.mark.parametrize("bump_revision", [0, 1_000_000_000])
"""``etcdctl snapshot restore`` without and with ``--bump-revision --mark-compacted``."""


async def shrink(job: SimJob, names: str) -> str:
    """Let a random member go and the others form a round; return who is left."""
    gone = job.loop.rng.choice(names)
    await job.leave(gone)
    rest = names.replace(gone, "")
    await job.until_works(rest, 5)
    return rest


@BUMPED
@simulated(min_nodes=2, max_nodes=4)
async def test_members_put_their_round_back_over_an_older_one(
    job: SimJob, bump_revision: int
) -> None:
    await job.all_work("abcd")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    saved = job.save()
    rest = await shrink(job, "abcd")
    rest = await shrink(job, rest) if job.loop.rng.random() < 0.5 else rest
    await job.pass_time(job.loop.rng.uniform(0, 50))
    joins = {name: job.nodes[name].joins for name in rest}
    job.restore(saved, bump_revision=bump_revision)
    await job.pass_time(100)
    assert job.works(rest), job.tell()
    assert {name: job.nodes[name].joins for name in rest} == joins, job.tell()
    job.start("e")
    await job.until_works(rest + "e", 30)
    epochs = list(dict.fromkeys(each.epoch for each in job.history.formed))
    assert epochs == sorted(epochs)


@simulated(min_nodes=2, max_nodes=3)
async def test_members_put_their_round_back_over_an_older_one_that_another_put_back_first(
    job: SimJob,
) -> None:
    """After a loss of data the first to come back knows only of an older round."""
    await job.all_work("abc")
    away = job.nodes[job.loop.rng.choice("abc")]
    rest = "abc".replace(away.name, "")
    away.connection.link.partition(silent=True)
    await job.until_works(rest, 2 * TTL_S)
    job.cut(rest)
    job.wipe()
    away.connection.link.heal()
    await job.until(lambda: away.node.leads, "the older round is back", 3 * TTL_S)
    job.heal(rest)
    await job.until_works("abc")
    numbers = [each.record.number for each in job.history.formed]
    assert numbers[-2:] == [2, 3], job.tell()


async def waiters_of_an_older_round(job: SimJob, bump_revision: int = 0) -> None:
    """Members that wait for the next round find their presences as they were when they worked in
    the last one, on the sessions that they still have."""
    await job.all_work("abc")
    await job.pass_time(TTL_S)
    saved = job.save()
    gone = job.loop.rng.choice("abc")
    rest = "abc".replace(gone, "")
    job.crash(gone)
    await job.until(
        lambda: all(job.nodes[name].joins == 2 for name in rest), "they wait", 3 * TTL_S
    )
    await job.pass_time(job.loop.rng.uniform(0, 2 * TTL_S))
    job.restore(saved, bump_revision=bump_revision)
    await job.pass_time(job.loop.rng.uniform(0, 2 * TTL_S))
    job.start("d")
    await job.until_works(rest + "d", 100)


@BUMPED
def test_members_that_wait_arrive_again_when_etcd_has_forgotten_that(bump_revision: int) -> None:
    simulate(
        partial(waiters_of_an_older_round, bump_revision=bump_revision), min_nodes=3, max_nodes=3
    )


async def two_worlds_of_one_name(job: SimJob, bump_revision: int) -> None:
    """A member was cut off while the others formed a later round. Then etcd goes back to when it
    was there, and the others are cut off for a while."""
    await job.all_work("abc")
    await job.pass_time(TTL_S)
    saved = job.save()
    away = job.loop.rng.choice("abc")
    rest = "abc".replace(away, "")
    job.nodes[away].connection.link.partition(silent=True)
    await job.until_works(rest, 2 * TTL_S)
    await job.pass_time(job.loop.rng.uniform(0, 30))
    for name in rest:
        job.nodes[name].connection.link.partition(silent=job.loop.rng.random() < 0.5)
    job.restore(saved, bump_revision=bump_revision)
    job.nodes[away].connection.link.heal()
    await job.pass_time(job.loop.rng.choice([0.1, TTL_S / 2, 3 * TTL_S]))
    job.heal(rest)
    await job.until_works("abc", 200)
    await job.pass_time(100)
    assert job.works("abc"), job.tell()
    named = [(each.record.run, each.record.number, each.epoch) for each in job.history.formed]
    assert len({name[:2] for name in named}) == len(set(named)), "a round's name was used twice"
    epochs = [node.world.epoch for node in job.members_now() if node.world is not None]
    assert set(epochs) == {max(each.epoch for each in job.history.formed)}


@BUMPED
def test_who_knows_of_no_later_round_does_not_go_on_beside_those_who_do(bump_revision: int) -> None:
    simulate(partial(two_worlds_of_one_name, bump_revision=bump_revision), min_nodes=1, max_nodes=3)


@BUMPED
@simulated(min_nodes=2, max_nodes=2)
async def test_rank_0_goes_to_who_trained_the_latest_world(job: SimJob, bump_revision: int) -> None:
    """All wait for the next round when etcd goes back to one that named others."""
    await job.all_work("ab")
    await job.pass_time(TTL_S)
    saved = job.save()
    job.crash("a")
    spare = job.start("c")
    await job.until_works("bc", 2 * TTL_S)
    await job.leave("b")
    await job.pass_time(job.loop.rng.choice([0.05, 5.0]))
    job.restore(saved, bump_revision=bump_revision)
    job.start("d")
    await job.until_works("cd", 60)
    assert spare.rank == 0
    assert spare.worlds[-1].epoch > spare.worlds[0].epoch


async def latest_beside_a_survivor(job: SimJob) -> None:
    """etcd goes back to a world whose rank 0 was cut off while the others formed a later one."""
    await job.all_work("abc")
    await job.pass_time(TTL_S)
    saved = job.save()
    (away,) = [name for name in "abc" if job.nodes[name].rank == 0]
    gone, stays = job.loop.rng.sample("abc".replace(away, ""), 2)
    job.nodes[away].connection.link.partition(silent=True)
    job.start("d")
    await job.until_works([gone, stays, "d"], 3 * TTL_S)
    await job.leave(gone)
    await job.pass_time(job.loop.rng.choice([0.05, 5.0]))
    job.restore(saved)
    job.nodes[away].connection.link.heal()
    await job.until_works([away, stays, "d"], 60)
    job.history.check()
    assert job.nodes[away].rank != 0, job.tell()


def test_rank_0_goes_to_a_newcomer_that_trained_the_latest_world_before_a_member_that_did_not() -> (
    None
):
    simulate(latest_beside_a_survivor, min_nodes=3, max_nodes=3)


@simulated(range(3), min_nodes=2, max_nodes=3)
async def test_who_missed_the_latest_world_is_no_heir_of_those_who_trained_it(job: SimJob) -> None:
    """It stops slowly: expelled from that world, and again when etcd has gone back."""
    await job.all_work("ab")
    await job.pass_time(TTL_S)
    slow, other = job.loop.rng.sample("ab", 2)
    job.nodes[slow].stops_in_s = 400.0
    saved = job.save()
    job.start("c")
    await job.until_works([other, "c"], 200)
    await job.leave(other)
    await job.pass_time(job.loop.rng.choice([0.05, 5.0]))
    job.restore(saved)
    job.start("d")
    await job.until_works("cd", 200)
    await job.until_works([slow, "c", "d"], 600)
    assert job.nodes["c"].rank == 0, job.tell()


@BUMPED
@simulated(min_nodes=2, max_nodes=2)
async def test_a_run_goes_on_although_etcd_goes_back_to_the_one_before(
    job: SimJob, bump_revision: int
) -> None:
    """Its record, and then its closed marker, were in the snapshot; neither is about this run."""
    await job.all_work("ab")
    before = job.save()
    await job.end("ab")
    after = job.save()
    await job.all_work("cd")
    await job.pass_time(job.loop.rng.uniform(0, 50))
    for saved in (before, after):
        job.restore(saved, bump_revision=bump_revision)
        await job.pass_time(3 * TTL_S)
        assert job.works("cd"), job.tell()
        assert job.nodes["c"].joins == job.nodes["d"].joins == 1, job.tell()
        assert job.nodes["c"].node.closure() is None


@pytest.mark.parametrize("slice_nodes", [1, 128])
@simulated(options=["slice_nodes"], min_nodes=2, max_nodes=4)
async def test_members_notice_it_although_others_have_written_as_much_again(job: SimJob) -> None:
    """Nobody can tell it from the revision that a watch goes on from after a break."""
    await job.all_work("abcd")
    await job.pass_time(TTL_S)
    saved = job.save()
    rest = await shrink(job, "abcd")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    joins = {name: job.nodes[name].joins for name in rest}
    revision = job.server.revision
    for name in rest:
        job.nodes[name].connection.link.partition(silent=job.loop.rng.random() < 0.5)
    job.restore(saved)
    while job.server.revision <= revision:
        job.server.apply(Txn((), (Put(b"/another application", b""),)))
    job.heal(rest)
    await job.until(
        lambda: job.history.formed[-1].record.epoch_fixed is not None,
        "their round is back",
        2 * TTL_S,
    )
    await job.pass_time(200)
    assert job.works(rest), job.tell()
    assert {name: job.nodes[name].joins for name in rest} == joins, job.tell()


@pytest.mark.parametrize("slice_nodes", [1, 128])
@simulated(range(40), options=["slice_nodes"], min_nodes=2, max_nodes=5)
async def test_members_put_their_round_back_again_at_the_very_same_revision(job: SimJob) -> None:
    """The same snapshot is restored twice; the second time, too, all that they put is lost."""
    await job.all_work("abc")
    job.start("d")
    waiting = [job.nodes[name] for name in "abcd"]
    await job.until(lambda: all(each.joins and each.world is None for each in waiting), "them")
    await job.pass_time(0.1)  # they have arrived; the round is open for a moment more
    saved = job.save()
    await job.until_works("abcd")
    await job.pass_time(TTL_S)
    joins = {name: job.nodes[name].joins for name in "abcd"}
    for _ in range(3):
        job.restore(saved)
        await job.pass_time(job.loop.rng.choice([0.1, 1.0, 5.0]))
    await job.pass_time(300)
    assert job.works("abcd"), job.tell()
    assert {name: job.nodes[name].joins for name in "abcd"} == joins, job.tell()


@simulated(range(40), min_nodes=1, max_nodes=2)
async def test_a_node_that_starts_while_etcd_goes_back_is_not_turned_away(job: SimJob) -> None:
    """The watch that it is about to open may ask for revisions that are compacted."""
    job.start("a")
    await job.until_works("a")
    saved = job.save()
    job.start("b")
    await job.pass_time(job.loop.rng.uniform(0.0, 0.01))
    job.restore(saved, bump_revision=1_000_000)
    await job.until_works("ab", 200)


# --- accusations that are back --------------------------------------------------------------------


def back_up_an_accusation(job: SimJob, victim: SimNode, by: SimNode) -> Snapshot:
    """Have a backup made while a wrong accusation stands, which is answered a moment later."""
    (presence,) = [kv for kv in job.server.snapshot() if kv.key == job.keys.node(victim.node_id)]
    accusation = Accusation(by.node_id, "its process exited (by the test)", is_certain=True)
    session = by.lease_id
    said = requests.accuse(job.keys, victim.node_id, presence, accusation, session)
    job.server.apply(said, by.node_id)
    saved = job.save()
    assert any(place.value == encode_accusation(accusation) for place in job.server.snapshot())
    return saved


async def accusation_is_back(
    job: SimJob, *, later_world: bool, other_leader: bool, bump_revision: int
) -> None:
    """What was wrong when the backup was made is wrong when etcd holds it again."""
    nodes = job.start_all("abc", delay_s=0.02)
    await job.until_works("abc")
    await job.pass_time(TTL_S + job.loop.rng.uniform(0, 5))
    near, (victim, by) = job.leader, job.loop.rng.sample(job.followers(), 2)
    saved = back_up_an_accusation(job, victim, by)
    await job.pass_time(3.0)
    assert [node.joins for node in nodes] == [1, 1, 1], job.tell()
    if later_world:
        job.start("d", delay_s=0.02)
        await job.until_works("abcd")
    if other_leader:
        job.revoke([near.lease_id])
        await job.until(lambda: not near.node.leads, "it lost the lead", TTL_S)
    await job.pass_time(TTL_S + 1.0)
    before = {node.name: node.joins for node in job.nodes.values()}
    near.connection.link.delay(0.0, 0.001)
    await job.pass_time(TTL_S)
    job.restore(saved, bump_revision=bump_revision)
    await job.pass_time(5 * TTL_S)
    assert {node.name: node.joins for node in job.nodes.values()} == before, job.tell()
    assert job.works(list(job.nodes)), job.tell()


@pytest.mark.parametrize("bump_revision", [0, 1_000_000_000])
@simulated(range(6), min_nodes=2, max_nodes=3)
async def test_an_accusation_that_is_back_is_no_proof_for_a_node_that_has_just_come(
    job: SimJob, bump_revision: int
) -> None:
    """It was the leader that was accused, so the lead is vacant in the backup, and a node that
    starts when etcd is there again takes it before a member is back."""
    nodes = job.start_all("abc", delay_s=0.02)
    await job.until_works("abc")
    await job.pass_time(TTL_S)
    saved = back_up_an_accusation(job, job.leader, job.loop.rng.choice(job.followers()))
    await job.pass_time(2 * TTL_S)
    job.cut(nodes)
    job.restore(saved, bump_revision=bump_revision)
    newcomer = job.start("d")
    await job.pass_time(1.0)
    assert newcomer.node.leads
    job.heal(nodes)
    await job.pass_time(5 * TTL_S)
    assert [each.joins for each in nodes] == [1, 1, 1], job.tell()
    assert job.works("abc"), job.tell()


def accusations_are_back(later_world: bool, other_leader: bool, bump_revision: int) -> None:
    scenario = partial(
        accusation_is_back,
        later_world=later_world,
        other_leader=other_leader,
        bump_revision=bump_revision,
    )
    simulate(scenario, min_nodes=2, max_nodes=4)


@BUMPED
@pytest.mark.parametrize("other_leader", [False, True])
@pytest.mark.parametrize("later_world", [False, True])
def test_an_accusation_that_is_back_makes_nobody_lost(
    later_world: bool, other_leader: bool, bump_revision: int
) -> None:
    accusations_are_back(later_world, other_leader, bump_revision)


def _as_they_are(nodes: Nodes, up_to: int) -> Nodes:
    return nodes


def _unnoticed(before: object, now: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("place", "name", "by", "other_leader", "bump_revision"),
    [
        (leading, "doubted", _as_they_are, False, 0),
        (leadership, "nodes_went_back", _unnoticed, False, 1_000_000_000),
        (node, "control_went_back", _unnoticed, True, 1_000_000_000),
    ],
    ids=["doubted", "nodes_went_back", "control_went_back"],
)
def test_each_guard_against_accusations_that_are_back_is_missed(
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    by: object,
    other_leader: bool,
    bump_revision: int,
) -> None:
    monkeypatch.setattr(place, name, by)
    monkeypatch.setattr(world, "SEEDS_AT_MOST", None)  # it ends with the first one that notices
    with pytest.raises(AssertionError):
        accusations_are_back(False, other_leader, bump_revision)
