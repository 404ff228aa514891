"""Members that watch each other: deaths are told early, and what looks like one is none.

The links are in memory; :mod:`tests.peers` has the real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from rdzv_etcd.errors import EtcdPermissionError
from rdzv_etcd.etcd.port import Etcd, KeyValue, Put, Txn
from rdzv_etcd.node import accuse
from rdzv_etcd.node.accuse import Accuser
from rdzv_etcd.node.peers import Evidence, PeerWatch, evidence_of
from rdzv_etcd.peers import Answer, Contact
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol import liveness as accusations
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.liveness import MOST_MISTAKES, LocalHealth
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.world_change import HOST_SILENT, PROCESS_EXITED, lost
from tests.sim.invariants import InvariantError
from tests.sim.matching import deletes, noted, puts
from tests.sim.world import TIMING, TTL_S, SimJob, simulate, simulated

LONG_LEASE = replace(TIMING, lease_ttl_s=30)

TOLD_S = 0.2
"""Links, the grace, two writes; far less than a lease."""
ESTABLISHED_S = 2.0
"""By then every member watches its neighbour."""


async def formed(job: SimJob, names: Sequence[str]) -> None:
    job.start_all(names)
    await job.until_works(names)
    await job.pass_time(ESTABLISHED_S)


async def told_after_s(job: SimJob, *names: str) -> float:
    """How long it takes until all others know that the round is over."""
    survivors = [node for node in job.nodes.values() if node.alive and node.name not in names]
    return await job.until(
        lambda: not any(node.is_working for node in survivors), "all are told", limit_s=30.0
    )


def cut_off(job: SimJob, name: str) -> None:
    """Let neither etcd nor the others reach that node."""
    assert job.switch is not None
    job.nodes[name].connection.link.partition()
    for other in job.nodes:
        if other != name:
            job.switch.cut(f"10.0.0.{name}", f"10.0.0.{other}")


def restarts(job: SimJob) -> int:
    return sum(node.joins - 1 for node in job.nodes.values())


def accused_in(job: SimJob) -> list[str]:
    return [line for line in job.history.log if " accuses " in line]


# --- what is told early ---------------------------------------------------------------------------


@pytest.mark.parametrize("slice_nodes", [128, 8])
def test_a_killed_process_is_told_at_once(slice_nodes: int) -> None:
    async def scenario(job: SimJob) -> None:
        await formed(job, "abcd")
        victim = job.loop.rng.choice("abcd")
        job.kill(victim)
        assert await told_after_s(job) < TOLD_S
        (change,) = [change for _, change in job.history.changes if change.lost]
        (how,) = change.lost.values()
        assert how.startswith(f"{PROCESS_EXITED} ({Answer.REFUSED.value}; ")
        await job.until_works([name for name in "abcd" if name != victim], limit_s=2.0)

    simulate(scenario, min_nodes=2, max_nodes=4, peer_links=True, slice_nodes=slice_nodes)


@pytest.mark.parametrize("one_way_s", [0.001, 0.02])
@pytest.mark.parametrize("names", ["ab", "abcdefgh"])
def test_a_process_that_is_killed_soon_after_its_world_was_formed_is_told_at_once(
    names: str, one_way_s: float
) -> None:
    """Members begin to look after each other 5 ms after that for each of them, and have a link
    some round trips to etcd later. Who dies before that is only missed with its lease."""

    async def scenario(job: SimJob, after_s: float) -> None:
        job.start_all(names, delay_s=one_way_s)
        await job.until(lambda: all(node.worlds for node in job.nodes.values()), "a world")
        await job.pass_time(after_s)
        job.kill(job.loop.rng.choice(names))
        assert await told_after_s(job) < TOLD_S + 16 * one_way_s

    first_link_s = 0.005 * len(names) + 2 * 6 * one_way_s + 0.01
    for after_s in (first_link_s, first_link_s + 0.02, 0.3, 0.35):
        simulate(
            partial(scenario, after_s=after_s),
            range(5),
            min_nodes=2,
            max_nodes=len(names),
            peer_links=True,
        )


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_killed_leader_is_told_at_once(job: SimJob) -> None:
    await formed(job, "abc")
    job.kill(job.leader.name)
    assert await told_after_s(job) < TOLD_S


@pytest.mark.parametrize("cut_off", [True, False])
@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_an_outage_of_etcd_does_not_count_as_its_distance(job: SimJob, cut_off: bool) -> None:
    """A reply that came when it was over says nothing of how far etcd is. If it did, each death
    would be told seconds late, as if the dead had so much time to answer."""
    await formed(job, "abc")
    await job.pass_time(12.0 + job.loop.rng.uniform(0.0, 4.0))
    if cut_off:
        assert job.switch is not None
        job.nodes["b"].connection.link.partition()
        for other in "ac":
            job.switch.cut("10.0.0.b", f"10.0.0.{other}")
        await told_after_s(job, "b")
        await job.pass_time(job.loop.rng.uniform(5.0, 10.0))
        job.nodes["b"].connection.link.heal()
        job.switch.heal()
        await job.until_works("abc")
    else:
        job.server.restart(4.0)
        await job.pass_time(6.0)
        await job.join_again("a", "its worker failed")
        await job.until_works("abc")
    await job.pass_time(70.0)  # who was wrong about another is believed again
    job.kill("b")
    assert await told_after_s(job, "b") < TOLD_S


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_host_that_falls_silent_is_told_in_seconds(job: SimJob) -> None:
    await formed(job, "abcd")
    await job.pass_time(10.0)  # the leader may trust what it does not hear
    job.crash(job.loop.rng.choice("abcd"))
    assert await told_after_s(job) < 4.0
    (change,) = [change for _, change in job.history.changes if change.lost]
    assert HOST_SILENT in next(iter(change.lost.values()))


@simulated(min_nodes=2, max_nodes=8, peer_links=True)
async def test_all_processes_of_a_host_are_found_one_after_the_other(job: SimJob) -> None:
    await formed(job, "abcdefgh")
    job.kill("b", "c", "d", "e")
    assert await job.until_works("afgh", limit_s=30.0) < 3.0


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_waiting_member_that_dies_holds_nobody_up(job: SimJob) -> None:
    await formed(job, "abcd")
    job.kill("b")
    await told_after_s(job)
    job.kill("d")
    assert await job.until_works("ac", limit_s=30.0) < 3.0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("first", ["killed", "reported"])
@simulated(min_nodes=2, max_nodes=5, peer_links=True, timing=LONG_LEASE)
async def test_a_member_that_dies_beside_one_that_was_lost_is_found(
    job: SimJob, first: str, at_once: bool
) -> None:
    """Only the one that was lost had a link to it; who has said that this one is gone does not
    matter."""
    await formed(job, "abcde")
    await job.pass_time(40.0)
    order = sorted(job.nodes.values(), key=lambda node: node.rank)
    at = job.loop.rng.randrange(5)
    dead, beside, *rest = (*order[at:], *order[:at])
    for node in (beside, *rest):
        node.stops_in_s = 3.0
    if at_once:
        job.kill(beside.name)
    if first == "killed":
        job.kill(dead.name)
    else:
        job.crash(dead.name)
        by = job.loop.rng.choice(rest)
        await job.on(by, by.node.report_dead(dead.node_id, "no power", certain=True))
    await told_after_s(job)
    if not at_once:
        await job.pass_time(job.loop.rng.uniform(1.0, 2.0))
        job.kill(beside.name)
    assert await job.until_works([node.name for node in rest], limit_s=40.0) < 5.0


def test_every_survivor_tells_once_at_warning_who_was_lost_and_how(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        await formed(job, "abcd")
        job.kill("b")
        await job.until_works("acd")
        await job.pass_time(60.0)

    with caplog.at_level(logging.WARNING):
        simulate(scenario, range(1), min_nodes=2, max_nodes=4, peer_links=True)
    told = [record.getMessage() for record in caplog.records if ": lost " in record.getMessage()]
    assert len(told) == 3
    assert all(lost("b", f"{PROCESS_EXITED} ({Answer.REFUSED.value}") in line for line in told)
    worlds = [
        record.getMessage() for record in caplog.records if "node rank " in record.getMessage()
    ]
    assert len(worlds) == 3, "and as what it works on"
    assert all("of 3 (was " in line for line in worlds)


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_who_says_good_bye_is_not_accused(job: SimJob) -> None:
    await formed(job, "abc")
    await job.leave("b")
    await job.until_works("ac")
    assert not accused_in(job)


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_what_was_said_of_the_dead_does_not_outlive_their_round(job: SimJob) -> None:
    await formed(job, "abc")
    job.kill("b")
    await job.until_works("ac")
    await job.pass_time(ESTABLISHED_S)
    places = [kv.key for kv in job.server.snapshot() if kv.key in job.keys.nodes]
    assert len(places) == 2


@simulated(min_nodes=2, max_nodes=4, peer_links=True, timing=LONG_LEASE)
async def test_who_waits_for_etcd_to_forget_the_dead_watches_the_living(job: SimJob) -> None:
    """etcd takes a while to delete what was said of members of the world before."""
    await formed(job, "abcd")
    victim = job.loop.rng.choice("abcd")
    forgotten, withdrawn = noted(deletes(job.keys.node(job.nodes[victim].node_id)))
    for node in job.nodes.values():
        node.connection.link.hold_requests(15.0, matching=forgotten)
    job.kill(victim)
    rest = [name for name in "abcd" if name != victim]
    await job.until_works(rest, 2.0)
    await job.pass_time(ESTABLISHED_S)
    assert withdrawn
    (said,) = accused_in(job)
    by = next(node for node in job.nodes.values() if f"{node.node_id} accuses" in said)
    (watched,) = [name for name in rest if job.nodes[name].rank == (by.rank + 1) % 3]
    job.kill(watched)
    assert await told_after_s(job) < TOLD_S


# --- what looks like a death and is none ----------------------------------------------------------


@simulated(min_nodes=2, max_nodes=8, peer_links=True)
async def test_links_that_all_break_at_once_are_there_again(job: SimJob) -> None:
    await formed(job, "abcdefgh")
    for _ in range(5):
        assert job.switch is not None
        job.switch.reset_all()
        await job.pass_time(job.loop.rng.uniform(0.1, 3.0))
    assert restarts(job) == 0
    assert not accused_in(job)


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_attempts_that_are_lost_on_the_way_accuse_nobody(job: SimJob) -> None:
    await formed(job, "abc")
    assert job.switch is not None
    for _ in range(5):
        job.switch.lose_attempts(2)
        job.switch.reset_all()
        await job.pass_time(10.0)
    assert restarts(job) == 0
    assert not accused_in(job)


@pytest.mark.parametrize("certain", [True, False])
@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_living_member_answers_over_a_slow_way_to_etcd(job: SimJob, certain: bool) -> None:
    """300 ms there and back, for all; an answer takes three times as long."""
    job.start_all("abcd")
    await job.until_works("abcd")
    for node in job.nodes.values():
        node.connection.link.delay(0.14, 0.16)
    await job.pass_time(2 * TTL_S)
    assert job.switch is not None
    if certain:
        job.switch.refuse("10.0.0.b")
    else:
        for other in "acd":
            job.switch.cut("10.0.0.b", f"10.0.0.{other}")
    await job.pass_time(60.0)
    assert accused_in(job)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_living_member_that_is_refused_answers(job: SimJob) -> None:
    """As by a firewall that breaks its links and refuses new ones."""
    await formed(job, "abcd")
    assert job.switch is not None
    job.nodes["b"].connection.link.delay(0.003, 0.004)  # busy, more than when it arrived
    job.switch.refuse("10.0.0.b")
    await job.pass_time(120.0)
    assert restarts(job) == 0
    assert 1 <= len(accused_in(job)) <= 3  # once, and not again within a minute


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_who_was_wrong_is_quiet_for_a_while(job: SimJob) -> None:
    await formed(job, "abcd")
    assert job.switch is not None
    for _ in range(12):
        job.switch.refuse("10.0.0.b")
        await job.pass_time(5.0)
        job.switch.heal()
        await job.pass_time(10.0)
    assert restarts(job) == 0
    assert 2 <= len(accused_in(job)) <= 1 + 12 * 15 / 60


@simulated(min_nodes=2, max_nodes=6, peer_links=True)
async def test_members_that_all_refuse_each_other_answer(job: SimJob) -> None:
    await formed(job, "abcdef")
    assert job.switch is not None
    for name in "abcdef":
        if not job.nodes[name].node.leads:
            job.nodes[name].connection.link.delay(0.003, 0.004)  # busy, as above
    for name in "abcdef":
        job.switch.refuse(f"10.0.0.{name}")
    await job.pass_time(30.0)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_an_accusation_that_comes_late_is_refused(job: SimJob) -> None:
    """The node has put its presence back since, or has arrived again."""
    await formed(job, "abc")
    assert job.switch is not None
    of_b = puts(job.keys.node(job.nodes["b"].node_id))
    for name in "ac":
        job.nodes[name].connection.link.repeat_requests(3.0, matching=of_b)
    job.switch.refuse("10.0.0.b")
    await job.pass_time(30.0)
    assert len(accused_in(job)) == 1


@pytest.mark.parametrize("both_ways", [True, False])
@simulated(range(5), min_nodes=2, max_nodes=4, peer_links=True)
async def test_members_that_cannot_see_each_other_answer(job: SimJob, both_ways: bool) -> None:
    await formed(job, "abcd")
    assert job.switch is not None
    for one in "abcd":
        for other in "abcd":
            if one != other and (both_ways or one < other):
                job.switch.cut(f"10.0.0.{one}", f"10.0.0.{other}")
    await job.pass_time(300.0)
    assert restarts(job) == 0
    for name in "abcd":
        accused = [line for line in accused_in(job) if f"{name}~" in line.split("accuses")[0]]
        assert len(accused) <= 300 / 60 + MOST_MISTAKES


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("one_way_s", [0.02, 0.1, 0.15])
@simulated(min_nodes=4, max_nodes=4, peer_links=True)
async def test_a_member_far_from_etcd_has_the_time_to_answer(
    job: SimJob, certain: bool, one_way_s: float
) -> None:
    """The leader is near it, and so is whoever accuses."""
    job.start("b")
    job.nodes["b"].connection.link.delay(0.95 * one_way_s, 1.05 * one_way_s)
    job.start_all("acd")
    await job.until_works("abcd")
    await job.pass_time(ESTABLISHED_S + TTL_S)
    assert job.switch is not None
    if certain:
        job.switch.refuse("10.0.0.b")
    else:
        for other in "acd":
            job.switch.cut("10.0.0.b", f"10.0.0.{other}")
    await job.pass_time(60.0)
    assert accused_in(job)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_neighbour_far_away_is_reached_again(job: SimJob) -> None:
    """A handshake takes two round trips, here longer than a process takes to die."""
    assert job.switch is not None
    job.switch.delay("10.0.0.b", 0.15)
    await formed(job, "abcd")
    for _ in range(3):
        job.switch.reset_all()
        await job.pass_time(5.0)
    assert not accused_in(job)


@pytest.mark.parametrize("stops_in_s", [10.0, 30.0])
@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_member_that_stops_its_workers_can_answer(job: SimJob, stops_in_s: float) -> None:
    """Its round is over, and whoever watches it now has never reached it: it is asked, and is no
    newcomer for that."""
    await formed(job, "abcd")
    order = sorted(job.nodes.values(), key=lambda node: node.rank)
    before, dead, slow, _ = (node.name for node in order)
    assert job.switch is not None
    job.switch.cut(f"10.0.0.{before}", f"10.0.0.{slow}")
    await job.pass_time(30.0)
    job.nodes[slow].stops_in_s = stops_in_s
    job.kill(dead)
    await job.until_works([node.name for node in order if node.name != dead], limit_s=60.0)
    await job.pass_time(60.0)
    assert any(slow in line.split("accuses")[1] for line in accused_in(job))
    assert restarts(job) == 3


@simulated(min_nodes=1, max_nodes=4, peer_links=True)
async def test_members_that_stop_their_workers_while_they_cannot_see_each_other(
    job: SimJob,
) -> None:
    """One of them is back at once, and would be enough for a world of its own."""
    await formed(job, "abcd")
    await job.pass_time(TTL_S)
    first = min(job.nodes.values(), key=lambda node: node.rank)
    assert job.switch is not None
    for node in job.nodes.values():
        node.stops_in_s = 0.0 if node is first else 20.0
    for one in "abcd":
        for other in "abcd":
            if one < other:
                job.switch.cut(f"10.0.0.{one}", f"10.0.0.{other}")
    assert first.agent is not None
    first.agent.cancel()  # its worker has failed
    first.agent = job.on(first, first.run())
    await job.pass_time(12.0)
    job.switch.heal()
    await job.until_works("abcd", limit_s=60.0)
    await job.pass_time(60.0)
    assert accused_in(job)
    assert restarts(job) == 4


@pytest.mark.parametrize("for_s", [0.5, 1.5, 5.0])
@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_stopped_process_whose_links_break_is_not_lost_before_its_lease(
    job: SimJob, for_s: float
) -> None:
    """Its host accepts for it all the while."""
    await formed(job, "abcd")
    await job.pass_time(TTL_S)
    stopped = next(node.name for node in job.nodes.values() if not node.node.leads)
    job.pause(stopped)
    await job.pass_time(0.1)
    assert job.switch is not None
    job.switch.reset_all()
    await job.pass_time(for_s)
    job.resume(stopped)
    await job.pass_time(60.0)
    assert restarts(job) == 0
    assert not accused_in(job)


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_stopped_process_that_is_killed_is_told_when_its_host_says_so(job: SimJob) -> None:
    await formed(job, "abc")
    job.pause("b")
    assert job.switch is not None
    job.switch.reset_all()
    await job.pass_time(2.0)
    job.kill("b")
    assert await told_after_s(job) < 6.0
    (change,) = [change for _, change in job.history.changes if change.lost]
    assert PROCESS_EXITED in next(iter(change.lost.values()))


@simulated(range(3), min_nodes=2, max_nodes=20, peer_links=True)
async def test_whoever_is_wrong_about_one_waits_for_that_before_it_accuses_the_next(
    job: SimJob,
) -> None:
    """Its own firewall refuses whatever it wants to connect to."""
    names = [f"n{number}" for number in range(20)]
    await formed(job, names)
    for name in names[1:3]:
        job.nodes[name].connection.link.delay(0.05, 0.06)
    await job.pass_time(TTL_S)
    assert job.switch is not None
    job.switch.refuse_for("10.0.0.n5")
    await job.pass_time(30.0)
    assert restarts(job) == 0
    assert 1 <= len(accused_in(job)) <= MOST_MISTAKES


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_an_accusation_whose_answer_was_lost_is_known_to_its_maker(job: SimJob) -> None:
    """So it is quiet about that node when that has answered."""
    await formed(job, "abc")
    assert job.switch is not None
    of_b = puts(job.keys.node(job.nodes["b"].node_id))
    for name in "ac":
        job.nodes[name].connection.link.drop_replies(matching=of_b)
    job.nodes["b"].connection.link.delay(0.003, 0.004)  # it is asked again before it answers
    job.switch.refuse("10.0.0.b")
    await job.pass_time(30.0)
    assert len(accused_in(job)) == 1
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=4, peer_links=True, timing=LONG_LEASE)
async def test_a_death_that_etcd_would_not_hear_of_is_told_when_it_does(job: SimJob) -> None:
    await formed(job, "abcd")
    victim = next(node.name for node in job.nodes.values() if not node.node.leads)
    of_it = puts(job.keys.node(job.nodes[victim].node_id))
    for node in job.nodes.values():
        node.connection.link.fail(EtcdPermissionError("no role"), matching=of_it)
    job.kill(victim)
    assert await told_after_s(job) < 8.0
    (change,) = [change for _, change in job.history.changes if change.lost]
    assert PROCESS_EXITED in next(iter(change.lost.values()))


@pytest.mark.parametrize("silence_s", [None, 0.0])
def test_two_that_go_together_are_told_together(silence_s: float | None) -> None:
    """The leader, and whoever is before it: two agents of a host."""

    async def scenario(job: SimJob) -> None:
        names = "abcdef"
        await formed(job, names)
        await job.pass_time(TTL_S)
        order = [node.name for node in sorted(job.nodes.values(), key=lambda node: node.rank)]
        lost = [order[order.index(job.leader.name) - 1], job.leader.name]
        job.kill(*lost)
        assert await told_after_s(job) < 1.0
        await job.until_works([name for name in names if name not in lost], limit_s=3.0)

    simulate(scenario, min_nodes=2, max_nodes=6, peer_links=True, peer_silence_s=silence_s)


@simulated(min_nodes=2, max_nodes=6, peer_links=True, timing=LONG_LEASE, peer_silence_s=3.0)
async def test_two_hosts_that_fall_silent_together(job: SimJob) -> None:
    names = "abcdef"
    await formed(job, names)
    await job.pass_time(30.0)
    order = [node.name for node in sorted(job.nodes.values(), key=lambda node: node.rank)]
    lost = [order[order.index(job.leader.name) - 1], job.leader.name]
    job.crash(*lost)
    assert await told_after_s(job) < 6.0


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_dead_spare_that_is_seated_is_found(job: SimJob) -> None:
    """Nobody watches spares; it dies with a member, as the other agent of a host does."""
    await formed(job, "abc")
    job.start("s")
    await job.pass_time(30.0)
    victim = next(n.name for n in job.nodes.values() if n.is_working and not n.node.leads)
    job.kill(victim, "s")
    await told_after_s(job)
    rest = [name for name in "abc" if name != victim]
    await job.until(
        lambda: all(
            job.nodes[name].is_working and len(job.nodes[name].worlds[-1].members) == 2
            for name in rest
        ),
        "a world without the dead",
        limit_s=5.0,
    )


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_member_that_is_back_after_a_while_is_watched_again(job: SimJob) -> None:
    await formed(job, "abc")
    assert job.switch is not None
    for node in job.nodes.values():
        node.connection.link.partition()
        for other in "abc":
            if node.name < other:
                job.switch.cut(f"10.0.0.{node.name}", f"10.0.0.{other}")
    job.revoke([node.node.context.session.lease_id for node in job.nodes.values()])
    await job.pass_time(TTL_S + 2.0)
    job.switch.heal()
    for name in "ac":
        job.nodes[name].connection.link.heal()
    await job.pass_time(4.0)
    job.nodes["b"].connection.link.heal()
    await job.pass_time(2 * TTL_S)
    assert restarts(job) == 0
    job.kill("b")
    assert await told_after_s(job) < TOLD_S


def test_links_that_fail_unexpectedly_end_no_node(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: object) -> Contact:
        raise ZeroDivisionError("a defect")

    async def scenario(job: SimJob) -> None:
        job.start("a")
        peers = job.nodes["a"].node._peers
        assert peers is not None
        peers._network.connect = broken  # type: ignore[assignment, method-assign]
        job.start_all("bc")
        await job.until_works("abc")
        await job.pass_time(30.0)
        assert restarts(job) == 0
        job.crash("a")
        await job.until_works("bc")

    simulate(scenario, range(1), min_nodes=2, max_nodes=3, peer_links=True)
    assert any("continues without its task 'peer links'" in line for line in caplog.messages)


@simulated(range(5), min_nodes=2, max_nodes=4, peer_links=True)
async def test_busy_members_that_cannot_see_each_other_answer(job: SimJob) -> None:
    """They take longer to answer than their distance from etcd says."""
    await formed(job, "abcd")
    await job.pass_time(TTL_S)
    assert job.switch is not None
    for node in job.nodes.values():
        if not node.node.leads:
            node.connection.link.delay(0.02, 0.03)
        for other in "abcd":
            if node.name < other:
                job.switch.cut(f"10.0.0.{node.name}", f"10.0.0.{other}")
    await job.pass_time(30.0)
    assert accused_in(job)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_stopped_process_is_not_lost_before_its_lease(job: SimJob) -> None:
    await formed(job, "abc")
    job.pause("b")
    await job.pass_time(5.0)
    job.resume("b")
    await job.pass_time(30.0)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_proxy_that_accepts_for_a_dead_process_only_makes_it_later(job: SimJob) -> None:
    await formed(job, "abc")
    await job.pass_time(10.0)
    assert job.switch is not None
    job.switch.accept_for("10.0.0.b")
    job.kill("b")
    assert await told_after_s(job) < 1.0


@simulated(min_nodes=2, max_nodes=4, peer_links=True, peer_silence_s=0.0)
async def test_without_a_time_of_silence_only_what_is_certain_is_told(job: SimJob) -> None:
    await formed(job, "abcd")
    await job.pass_time(10.0)
    assert job.switch is not None
    job.switch.accept_for("10.0.0.b")
    job.switch.reset_all()
    await job.pass_time(30.0)
    assert not accused_in(job)
    job.kill("d")
    assert await told_after_s(job) < TOLD_S


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_member_that_was_absent_for_a_moment_is_watched_all_the_same(job: SimJob) -> None:
    """Its lease was taken while its neighbour looked where to find it."""
    job.start_all("abc")
    await job.until_works("abc")
    b = job.nodes["b"]
    b.connection.link.partition()
    job.revoke([b.node.context.session.lease_id])
    await job.pass_time(1.0)
    b.connection.link.heal()
    await job.pass_time(2 * ESTABLISHED_S)
    assert restarts(job) == 0
    job.kill("b")
    assert await told_after_s(job) < TOLD_S


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_etcd_away_while_all_links_break(job: SimJob) -> None:
    await formed(job, "abcd")
    assert job.switch is not None
    for node in job.nodes.values():
        node.connection.link.partition()
    job.switch.reset_all()
    await job.pass_time(job.loop.rng.uniform(1.0, 30.0))
    job.switch.reset_all()
    for node in job.nodes.values():
        node.connection.link.heal()
    await job.pass_time(60.0)
    assert restarts(job) == 0


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_one_that_is_cut_off_from_etcd_and_its_peers_is_lost_and_comes_back(
    job: SimJob,
) -> None:
    await formed(job, "abc")
    await job.pass_time(10.0)
    assert job.switch is not None
    b = job.nodes["b"]
    b.connection.link.partition()
    for other in "ac":
        job.switch.cut("10.0.0.b", f"10.0.0.{other}")
    assert await told_after_s(job, "b") < 5.0
    await job.until_works("ac")
    b.connection.link.heal()
    job.switch.heal()
    await job.until_works("abc")


@simulated(min_nodes=4, max_nodes=4, peer_links=True)
async def test_one_that_was_lost_and_came_back_is_watched_as_before(job: SimJob) -> None:
    """Two were cut off at once, so the change names one of them only; whoever has accused them was
    right about both."""
    names = "abcd"
    await formed(job, names)
    await job.pass_time(TTL_S + 2.0)
    cut_off(job, "b")
    cut_off(job, "d")
    await told_after_s(job, "b", "d")
    await job.pass_time(8.0)
    assert job.switch is not None
    job.switch.heal()
    job.nodes["b"].connection.link.heal()
    cut_off(job, "d")
    await job.pass_time(10.0)
    job.switch.heal()
    job.nodes["d"].connection.link.heal()
    await job.until_works(names)
    await job.pass_time(5.0)
    job.kill(job.loop.rng.choice("bd"))
    # Since the cut etcd seems farther away than it is, which is time to answer.
    assert await told_after_s(job) < TTL_S / 2


def test_a_member_that_cannot_be_reached_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        assert job.switch is not None
        job.switch.refuse("10.0.0.b")
        await formed(job, "ab")
        await job.pass_time(60.0)
        assert restarts(job) == 0
        assert not accused_in(job)

    simulate(scenario, range(1), min_nodes=2, max_nodes=2, peer_links=True)
    (line,) = [text for text in caplog.messages if "cannot reach" in text]
    assert "a: this node cannot reach b at 10.0.0.b:" in line
    assert Answer.REFUSED.value in line
    assert "MASTER_ADDR" in line


@simulated(range(1), min_nodes=2, max_nodes=3, peer_links=True)
async def test_links_that_break_as_soon_as_they_are_made_are_made_less_and_less_often(
    job: SimJob,
) -> None:
    """As those of too many that watch one node would."""
    await formed(job, "abc")
    assert job.switch is not None
    made = 0
    for _ in range(60_000):
        made += len(job.switch._links)
        job.switch.reset_all()
        await job.pass_time(0.001)
    assert 3 < made < 3 * 60
    assert restarts(job) == 0
    job.kill("b")
    assert await told_after_s(job) < TTL_S


@pytest.mark.parametrize(
    ("answer", "linked", "fell_silent", "others", "evidence"),
    [
        (Answer.REFUSED, True, False, False, Evidence.GONE),
        (Answer.OTHER, True, False, False, Evidence.GONE),
        (Answer.REFUSED, True, True, False, Evidence.REFUSED),  # also when it is tried once more
        (Answer.REFUSED, False, False, True, Evidence.REFUSED),
        (Answer.REFUSED, False, False, False, None),  # it may be unreachable, and live
        (Answer.UNREACHABLE, True, False, False, Evidence.SILENT),
        (Answer.UNREACHABLE, False, False, True, Evidence.SILENT),
        (Answer.UNREACHABLE, False, False, False, None),
        (Answer.MUTE, True, False, False, Evidence.SILENT),
        (Answer.MUTE, False, False, True, None),
        (Answer.HELD, True, True, True, None),  # its kernel answers for it
    ],
)
def test_evidence(
    answer: Answer, linked: bool, fell_silent: bool, others: bool, evidence: Evidence | None
) -> None:
    contact = Contact(answer)
    seen = evidence_of(contact, was_linked=linked, fell_silent=fell_silent, others_are_gone=others)
    assert seen is evidence


@pytest.mark.parametrize("stopped", [False, True])
@simulated(range(20), min_nodes=2, max_nodes=8, peer_links=True)
async def test_whatever_happens_to_links_restarts_nobody(job: SimJob, stopped: bool) -> None:
    """Ten minutes of it, at any moment and together. Whoever is stopped cannot answer: then nothing
    on the way says that it is gone, or cuts it off."""
    rng, names = job.loop.rng, "abcdefgh"[: job.loop.rng.randint(2, 8)]
    for name in names:
        node = job.start(name)
        far_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 0.1)])
        node.connection.link.delay(0.9 * far_s, far_s)
    await job.until_works(names)
    await job.pass_time(2 * TTL_S)
    switch, places = job.switch, [f"10.0.0.{name}" for name in names]
    assert switch is not None

    def cut() -> None:
        one, other = rng.sample(places, 2)
        switch.cut(one, other)

    def stop() -> None:
        node = job.nodes[rng.choice(names)]
        if not node.node.leads:  # its own stop is another matter: nobody leads meanwhile
            job.pause(node.name)
            job.loop.call_later(rng.uniform(0.1, 2.5), job.resume, node.name)

    faults: list[Callable[[], object]] = [
        switch.reset_all,
        switch.heal,
        lambda: switch.delay(rng.choice(places), rng.uniform(0.0, 0.05)),
    ]
    lies = [
        cut,
        lambda: switch.lose_attempts(rng.randint(1, 4)),
        lambda: switch.refuse(rng.choice(places)),
        lambda: switch.refuse_for(rng.choice(places)),
        lambda: switch.accept_for(rng.choice(places)),
    ]
    faults += [stop] if stopped else lies
    while job.loop.time() < 600:
        rng.choice(faults)()
        await job.pass_time(rng.choice([0.0, 0.1, 1.0, 5.0, 20.0]) * rng.random())
    assert restarts(job) == 0
    assert len(accused_in(job)) <= 600 / 60 * MOST_MISTAKES * len(names)


# --- what would be missed without its guard -------------------------------------------------------


async def _no_second_look(self: PeerWatch, info: NodeInfo) -> Contact:
    return Contact(Answer.REFUSED, "not asked")


def _never_quiet(self: LocalHealth, node_id: str, now_s: float) -> float:
    return 0.0


def _unguarded(
    keys: JobKeys, node_id: str, presence: KeyValue, accusation: Accusation, session: int
) -> Txn:
    return Txn((), (Put(keys.node(node_id), values.encode_accusation(accusation), session),))


async def _stays(self: Accuser) -> None:
    """Withdraw nothing."""


async def _trusts_the_answer(
    etcd: Etcd, keys: JobKeys, presence: KeyValue, accusation: Accusation, lease_id: int
) -> int:
    txn = requests.accuse(keys, keys.node_id(presence.key), presence, accusation, lease_id)
    result = await etcd.txn(txn, repeatable=True)
    return result.revision if result.succeeded else 0


@pytest.mark.parametrize(
    ("place", "name", "by", "noticed_by"),
    [
        (
            PeerWatch,
            "_recontact",
            _no_second_look,
            test_links_that_all_break_at_once_are_there_again,
        ),
        (LocalHealth, "quiet_until_s", _never_quiet, test_who_was_wrong_is_quiet_for_a_while),
        (accusations, "ANSWER_GRACE_S", 0.0, test_a_living_member_that_is_refused_answers),
        (accusations, "ABSENCE_GRACE_S", 0.0, test_busy_members_that_cannot_see_each_other_answer),
        (Accuser, "withdraw", _stays, test_what_was_said_of_the_dead_does_not_outlive_their_round),
        (requests, "accuse", _unguarded, test_an_accusation_that_comes_late_is_refused),
        (
            accuse,
            "put_accusation",
            _trusts_the_answer,
            test_an_accusation_whose_answer_was_lost_is_known_to_its_maker,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_guard_is_missed(
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    by: object,
    noticed_by: Callable[[], None],
) -> None:
    monkeypatch.setattr(place, name, by)
    with pytest.raises((AssertionError, InvariantError)):
        noticed_by()
