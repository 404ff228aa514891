"""Members that watch each other: a death is known early, and nobody alive is taken for dead.

The links are in memory; :mod:`tests.peers` has the real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdPermissionError, EtcdUnavailableError
from rdzv_etcd.etcd.port import Etcd, KeyValue, Put, Txn
from rdzv_etcd.node import accuse
from rdzv_etcd.node.accuse import Accuser
from rdzv_etcd.node.peers import Evidence, LinkSeen, PeerWatch
from rdzv_etcd.peers import Answer, Contact
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol import liveness, requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.liveness import MOST_MISTAKES, LocalHealth
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.world_change import HOST_SILENT, PROCESS_EXITED, lost
from tests.sim.invariants import InvariantError
from tests.sim.matching import deletes, noted, puts
from tests.sim.world import TIMING, TTL_S, SimJob, SimNode, simulate, simulated
from tests.support.scenarios import Scenario, as_test

LONG_LEASE = replace(TIMING, lease_ttl_s=30)

KNOWN_S = 0.2
"""Links, the grace, two writes; far less than a lease."""
ESTABLISHED_S = 2.0
"""By then every member watches its neighbor."""


def linked(
    names: Sequence[str] = "abcd",
    seeds: Iterable[int] = range(20),
    *,
    accusations: Container[int] | None = None,
    **settings: Any,
) -> Callable[[Scenario], Callable[..., None]]:
    """Make a scenario a test: it gets a job whose members watch each other.

    With ``accusations`` nobody may restart in it, and so many members may be accused.
    """

    def run(scenario: Scenario) -> None:
        async def with_links(job: SimJob) -> None:
            await formed(job, names)
            await scenario(job)
            if accusations is not None:
                assert restarts(job) == 0
                assert len(accused_in(job)) in accusations

        simulate(
            with_links,
            seeds,
            **{"min_nodes": 2, "max_nodes": len(names), "peer_links": True, **settings},
        )

    return as_test(run, given=1)


NO_ACCUSATION = (0,)


async def formed(job: SimJob, names: Sequence[str]) -> None:
    job.start_all(names)
    await job.until_works(names)
    await job.pass_time(ESTABLISHED_S)


async def known_after_s(job: SimJob, *names: str) -> float:
    """How long it takes until all others know that the round is over."""
    survivors = [node for node in job.nodes.values() if node.alive and node.name not in names]
    return await job.until(
        lambda: not any(node.is_working for node in survivors), "all know", limit_s=30.0
    )


def place(name: str) -> str:
    return f"10.0.0.{name}"


def cut_apart(job: SimJob, names: str) -> None:
    """Let none of these nodes reach another one."""
    for one, other in combinations(names, 2):
        job.network.cut(place(one), place(other))


def cut_links_of(job: SimJob, name: str, names: str = "abcd") -> None:
    for other in names:
        if other != name:
            job.network.cut(place(name), place(other))


def cut_off(job: SimJob, name: str, names: str = "abcd") -> None:
    """Let neither etcd nor the others reach that node."""
    job.nodes[name].connection.link.partition()
    cut_links_of(job, name, names)


def restarts(job: SimJob) -> int:
    return sum(node.joins - 1 for node in job.nodes.values())


def accused_in(job: SimJob) -> list[str]:
    return [line for line in job.history.log if " accuses " in line]


def how_lost(job: SimJob) -> str:
    """How the first member was lost of the only change that names any."""
    (change,) = [change for _, change in job.history.changes if change.lost]
    return next(iter(change.lost.values()))


def by_rank(job: SimJob) -> list[SimNode]:
    return sorted(job.nodes.values(), key=lambda node: node.rank)


def keep_busy(job: SimJob, from_s: float, to_s: float) -> None:
    """Let all but the leader take longer to answer than their distance from etcd shows."""
    for node in job.followers():
        node.connection.link.delay(from_s, to_s)


# --- what is known early --------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("slice_nodes", [128, 8])
def test_a_killed_process_is_known_at_once(slice_nodes: int, leads: bool) -> None:
    @linked(slice_nodes=slice_nodes)
    async def scenario(job: SimJob) -> None:
        victim = job.leader.name if leads else job.loop.rng.choice("abcd")
        job.kill(victim)
        assert await known_after_s(job) < KNOWN_S
        assert how_lost(job).startswith(f"{PROCESS_EXITED} ({Answer.REFUSED.value}; ")
        await job.until_works([name for name in "abcd" if name != victim], limit_s=2.0)

    scenario()


@pytest.mark.parametrize("one_way_s", [0.001, 0.02])
@pytest.mark.parametrize("names", ["ab", "abcdefgh"])
def test_a_process_that_is_killed_soon_after_its_world_was_formed_is_known_at_once(
    names: str, one_way_s: float
) -> None:
    """Members begin to look after each other 5 ms after that for each of them, and have a link
    some round trips to etcd later. A death before that shows only with the lease."""

    async def scenario(job: SimJob, after_s: float) -> None:
        job.start_all(names, delay_s=one_way_s)
        await job.until(lambda: all(node.worlds for node in job.nodes.values()), "a world")
        await job.pass_time(after_s)
        job.kill(job.loop.rng.choice(names))
        assert await known_after_s(job) < KNOWN_S + 16 * one_way_s

    first_link_s = 0.005 * len(names) + 2 * 6 * one_way_s + 0.01
    for after_s in (first_link_s, first_link_s + 0.02, 0.3, 0.35):
        simulate(
            partial(scenario, after_s=after_s),
            range(5),
            min_nodes=2,
            max_nodes=len(names),
            peer_links=True,
        )


@pytest.mark.parametrize("of_one", [True, False])
@linked("abc")
async def test_an_outage_of_etcd_does_not_count_as_its_distance(job: SimJob, of_one: bool) -> None:
    """A reply that came when it was over shows nothing of how far etcd is. If it did, each death
    would be known seconds late, as if the dead had so much time to answer."""
    await job.pass_time(12.0 + job.loop.rng.uniform(0.0, 4.0))
    if of_one:
        cut_off(job, "b", "abc")
        await known_after_s(job, "b")
        await job.pass_time(job.loop.rng.uniform(5.0, 10.0))
        job.nodes["b"].connection.link.heal()
        job.network.heal()
    else:
        job.server.restart(4.0)
        await job.pass_time(6.0)
        await job.join_again("a", "its worker failed")
    await job.until_works("abc")
    await job.pass_time(70.0)  # a node that was wrong about another is believed again
    job.kill("b")
    assert await known_after_s(job, "b") < KNOWN_S


@linked()
async def test_a_host_that_falls_silent_is_known_in_seconds(job: SimJob) -> None:
    await job.pass_time(10.0)  # the leader may trust what it does not hear
    job.crash(job.loop.rng.choice("abcd"))
    assert await known_after_s(job) < 4.0
    assert HOST_SILENT in how_lost(job)


@linked("abcdefgh")
async def test_all_processes_of_a_host_are_found_one_after_the_other(job: SimJob) -> None:
    job.kill("b", "c", "d", "e")
    assert await job.until_works("afgh", limit_s=30.0) < 3.0


@linked()
async def test_a_waiting_member_that_dies_holds_nobody_up(job: SimJob) -> None:
    job.kill("b")
    await known_after_s(job)
    job.kill("d")
    assert await job.until_works("ac", limit_s=30.0) < 3.0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("first", ["killed", "evicted"])
@linked("abcde", timing=LONG_LEASE)
async def test_a_member_that_dies_beside_one_that_was_lost_is_found(
    job: SimJob, first: str, at_once: bool
) -> None:
    """Only the one that was lost had a link to it, whoever accused this one."""
    await job.pass_time(40.0)
    order = by_rank(job)
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
        job.accuse(dead, job.loop.rng.choice(rest))
    await known_after_s(job)
    if not at_once:
        await job.pass_time(job.loop.rng.uniform(1.0, 2.0))
        job.kill(beside.name)
    assert await job.until_works([node.name for node in rest], limit_s=40.0) < 5.0


@pytest.mark.parametrize(
    ("end", "silence_s", "limit_s"),
    [(SimJob.kill, None, 1.0), (SimJob.kill, 0.0, 1.0), (SimJob.crash, 3.0, 6.0)],
)
def test_two_that_end_together_are_known_together(
    end: Callable[..., None], silence_s: float | None, limit_s: float
) -> None:
    """The leader, and the member before it: two agents of a host, or two hosts."""

    @linked("abcdef", peer_silence_s=silence_s, timing=LONG_LEASE)
    async def scenario(job: SimJob) -> None:
        await job.pass_time(30.0)
        order = [node.name for node in by_rank(job)]
        dead = [order[order.index(job.leader.name) - 1], job.leader.name]
        end(job, *dead)
        assert await known_after_s(job) < limit_s
        await job.until_works([name for name in order if name not in dead], limit_s=3.0)

    scenario()


@linked("abc")
async def test_a_dead_spare_that_is_seated_is_found(job: SimJob) -> None:
    """Nobody watches spares; it dies with a member, as the other agent of a host does."""
    job.start("s")
    await job.pass_time(30.0)
    victim = next(n.name for n in job.followers() if n.is_working)
    job.kill(victim, "s")
    await known_after_s(job)
    rest = [name for name in "abc" if name != victim]
    await job.until(
        lambda: all(
            job.nodes[name].is_working and len(job.nodes[name].worlds[-1].members) == 2
            for name in rest
        ),
        "a world without the dead",
        limit_s=5.0,
    )


@linked("abc")
async def test_a_stopped_process_that_is_killed_is_known_when_its_host_refuses(job: SimJob) -> None:
    job.pause("b")
    job.network.reset_all()
    await job.pass_time(2.0)
    job.kill("b")
    assert await known_after_s(job) < 6.0
    assert PROCESS_EXITED in how_lost(job)


@linked("abc")
async def test_a_proxy_that_accepts_for_a_dead_process_only_makes_it_later(job: SimJob) -> None:
    await job.pass_time(10.0)
    job.network.accept_for(place("b"))
    job.kill("b")
    assert await known_after_s(job) < 1.0


@linked(timing=LONG_LEASE)
async def test_a_death_that_etcd_refused_to_record_is_known_when_it_does(job: SimJob) -> None:
    victim = job.followers()[0]
    of_it = puts(job.keys.node(victim.node_id))
    for node in job.nodes.values():
        node.connection.link.fail(EtcdPermissionError("no role"), matching=of_it)
    job.kill(victim.name)
    assert await known_after_s(job) < 8.0
    assert PROCESS_EXITED in how_lost(job)


def test_every_survivor_logs_once_at_warning_who_was_lost_and_how(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @linked(seeds=range(1))
    async def scenario(job: SimJob) -> None:
        job.kill("b")
        await job.until_works("acd")
        await job.pass_time(60.0)

    with caplog.at_level(logging.WARNING):
        scenario()
    losses = [line for line in caplog.messages if ": lost " in line]
    assert len(losses) == 3
    assert all(lost("b", f"{PROCESS_EXITED} ({Answer.REFUSED.value}") in line for line in losses)
    worlds = [line for line in caplog.messages if "node rank " in line]
    assert len(worlds) == 3, "and as what it works on"
    assert all("of 3 (was " in line for line in worlds)


# --- accusations do not outlive what they are for -------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@linked("abc")
async def test_an_accusation_does_not_outlive_its_round(job: SimJob, fails: bool) -> None:
    """If it cannot be withdrawn then, it does not outlive the next one."""
    withdrawn = deletes(job.keys.node(job.nodes["b"].node_id))
    job.kill("b")
    for name in "ac" if fails else "":
        job.nodes[name].connection.link.fail(EtcdUnavailableError("away"), 1, withdrawn)
    await job.until_works("ac")
    await job.pass_time(ESTABLISHED_S)
    if fails:
        await job.join_again("a")
        await job.until_works("ac")
        await job.pass_time(ESTABLISHED_S)
    places = [kv.key for kv in job.server.snapshot() if kv.key in job.keys.nodes]
    assert len(places) == 2


@linked(timing=LONG_LEASE)
async def test_a_node_that_waits_for_etcd_to_forget_the_dead_watches_the_living(
    job: SimJob,
) -> None:
    """etcd takes a while to delete the accusations of members of the world before."""
    victim = job.loop.rng.choice("abcd")
    forgotten, withdrawn = noted(deletes(job.keys.node(job.nodes[victim].node_id)))
    for node in job.nodes.values():
        node.connection.link.hold_requests(15.0, matching=forgotten)
    job.kill(victim)
    rest = [name for name in "abcd" if name != victim]
    await job.until_works(rest, 2.0)
    await job.pass_time(ESTABLISHED_S)
    assert withdrawn
    (accused,) = accused_in(job)
    by = next(node for node in job.nodes.values() if f"{node.node_id} accuses" in accused)
    (watched,) = [name for name in rest if job.nodes[name].rank == (by.rank + 1) % 3]
    job.kill(watched)
    assert await known_after_s(job) < KNOWN_S


# --- what looks like a death and is none ----------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 2])
@linked("abcdefgh", accusations=NO_ACCUSATION)
async def test_links_that_all_break_at_once_are_there_again(job: SimJob, lost: int) -> None:
    """Though the first attempts are lost on the way."""
    for _ in range(5):
        job.network.lose_attempts(lost)
        job.network.reset_all()
        await job.pass_time(job.loop.rng.uniform(0.1, 10.0))


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_neighbor_far_away_is_reached_again(job: SimJob) -> None:
    """A handshake takes two round trips, here longer than a process takes to die."""
    job.network.delay(place("b"), 0.15)
    await formed(job, "abcd")
    for _ in range(3):
        job.network.reset_all()
        await job.pass_time(5.0)
    assert not accused_in(job)


@simulated(min_nodes=2, max_nodes=4, peer_links=True)
async def test_a_neighbor_far_away_is_reached_after_a_loss(job: SimJob) -> None:
    """Though it may be gone as well, and nothing shows how far away it is."""
    job.network.delay(place("c"), 0.09)
    await formed(job, "abcd")
    ranks = [node.name for node in by_rank(job)]
    lost = ranks[ranks.index("c") - 1]  # now another one watches c
    job.kill(lost)
    await job.until_works([name for name in ranks if name != lost], limit_s=30.0)
    await job.pass_time(20.0)
    assert len(accused_in(job)) == 1


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize(
    ("far", "one_way_s"), [("b", 0.02), ("b", 0.1), ("b", 0.15), ("abcd", 0.15)]
)
@simulated(min_nodes=4, max_nodes=4, peer_links=True)
async def test_a_member_far_from_etcd_has_the_time_to_answer(
    job: SimJob, far: str, one_way_s: float, certain: bool
) -> None:
    """An answer takes three round trips. Where all are far, they were near when they arrived."""
    job.start("b")
    if far == "b":
        job.nodes["b"].connection.link.delay(0.95 * one_way_s, 1.05 * one_way_s)
    job.start_all("acd")
    await job.until_works("abcd")
    for name in far:
        job.nodes[name].connection.link.delay(0.95 * one_way_s, 1.05 * one_way_s)
    await job.pass_time(2 * TTL_S)
    if certain:
        job.network.refuse(place("b"))
    else:
        cut_links_of(job, "b")
    await job.pass_time(60.0)
    assert accused_in(job)
    assert restarts(job) == 0


@linked(accusations=range(2, 5))
async def test_a_node_that_was_wrong_is_quiet_for_a_while(job: SimJob) -> None:
    for _ in range(12):
        job.network.refuse(place("b"))
        await job.pass_time(5.0)
        job.network.heal()
        await job.pass_time(10.0)


@linked("abcdef", accusations=range(1, 100))
async def test_members_that_all_refuse_each_other_answer(job: SimJob) -> None:
    keep_busy(job, 0.003, 0.004)
    for name in "abcdef":
        job.network.refuse(place(name))
    await job.pass_time(30.0)


@linked("abc", accusations=(1,))
async def test_an_accusation_that_comes_late_is_refused(job: SimJob) -> None:
    """The node has put its presence back since, or has arrived again."""
    of_b = puts(job.keys.node(job.nodes["b"].node_id))
    for name in "ac":
        job.nodes[name].connection.link.repeat_requests(3.0, matching=of_b)
    job.network.refuse(place("b"))
    await job.pass_time(30.0)


@linked("abc", accusations=(1,))
async def test_an_accusation_whose_answer_was_lost_is_known_to_its_maker(job: SimJob) -> None:
    """So it is quiet about that node when that has answered."""
    of_b = puts(job.keys.node(job.nodes["b"].node_id))
    for name in "ac":
        job.nodes[name].connection.link.drop_replies(matching=of_b)
    job.nodes["b"].connection.link.delay(0.003, 0.004)  # it is asked again before it answers
    job.network.refuse(place("b"))
    await job.pass_time(30.0)


@pytest.mark.parametrize("busy", [True, False])
@linked(seeds=range(5), accusations=range(1, 100))
async def test_members_that_cannot_see_each_other_answer(job: SimJob, busy: bool) -> None:
    await job.pass_time(TTL_S)
    if busy:
        keep_busy(job, 0.02, 0.03)
    cut_apart(job, "abcd")
    await job.pass_time(300.0)
    for name in "abcd":
        accused = [line for line in accused_in(job) if f"{name}~" in line.split("accuses")[0]]
        assert len(accused) <= 300 / 60 + MOST_MISTAKES


@linked([f"n{number}" for number in range(20)], range(3), accusations=range(1, MOST_MISTAKES + 1))
async def test_a_node_that_is_wrong_about_one_waits_for_that_before_it_accuses_the_next(
    job: SimJob,
) -> None:
    """Its own firewall refuses whatever it wants to connect to."""
    for name in ("n1", "n2"):
        job.nodes[name].connection.link.delay(0.05, 0.06)
    await job.pass_time(TTL_S)
    job.network.refuse_for(place("n5"))
    await job.pass_time(30.0)


@pytest.mark.parametrize("links_break", [True, False])
@pytest.mark.parametrize("for_s", [0.5, 1.5, 5.0])
@linked(accusations=NO_ACCUSATION)
async def test_a_stopped_process_is_not_lost_before_its_lease(
    job: SimJob, for_s: float, links_break: bool
) -> None:
    """Its host accepts for it all the while."""
    await job.pass_time(TTL_S)
    stopped = job.followers()[0].name
    job.pause(stopped)
    await job.pass_time(0.1)
    if links_break:
        job.network.reset_all()
    await job.pass_time(for_s)
    job.resume(stopped)
    await job.pass_time(60.0)


@linked(peer_silence_s=0.0)
async def test_without_a_limit_of_silence_only_certain_evidence_counts(job: SimJob) -> None:
    await job.pass_time(10.0)
    job.network.accept_for(place("b"))
    job.network.reset_all()
    await job.pass_time(30.0)
    assert not accused_in(job)
    job.kill("d")
    assert await known_after_s(job) < KNOWN_S


@linked(accusations=range(100))
async def test_etcd_away_while_all_links_break(job: SimJob) -> None:
    job.cut(job.nodes.values())
    job.network.reset_all()
    await job.pass_time(job.loop.rng.uniform(1.0, 30.0))
    job.network.reset_all()
    job.heal(job.nodes.values())
    await job.pass_time(60.0)


@pytest.mark.parametrize("stopped", [False, True])
@simulated(range(20), min_nodes=2, max_nodes=8, peer_links=True)
async def test_whatever_happens_to_links_restarts_nobody(job: SimJob, stopped: bool) -> None:
    """Ten minutes of it, at any moment and together. A node that is stopped cannot answer: then
    nothing on the way shows that it is gone, or cuts it off."""
    rng, names = job.loop.rng, "abcdefgh"[: job.loop.rng.randint(2, 8)]
    for name in names:
        node = job.start(name)
        far_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 0.1)])
        node.connection.link.delay(0.9 * far_s, far_s)
    await job.until_works(names)
    await job.pass_time(2 * TTL_S)
    places = [place(name) for name in names]

    def stop() -> None:
        node = job.nodes[rng.choice(names)]
        if not node.node.leads:  # its own stop is another matter: nobody leads meanwhile
            job.pause(node.name)
            job.loop.call_later(rng.uniform(0.1, 2.5), job.resume, node.name)

    faults: list[Callable[[], object]] = [
        job.network.reset_all,
        job.network.heal,
        lambda: job.network.delay(rng.choice(places), rng.uniform(0.0, 0.05)),
    ]
    lies = [
        lambda: job.network.cut(*rng.sample(places, 2)),
        lambda: job.network.lose_attempts(rng.randint(1, 4)),
        lambda: job.network.refuse(rng.choice(places)),
        lambda: job.network.refuse_for(rng.choice(places)),
        lambda: job.network.accept_for(rng.choice(places)),
    ]
    faults += [stop] if stopped else lies
    while job.loop.time() < 600:
        rng.choice(faults)()
        await job.pass_time(rng.choice([0.0, 0.1, 1.0, 5.0, 20.0]) * rng.random())
    assert restarts(job) == 0
    assert len(accused_in(job)) <= 600 / 60 * MOST_MISTAKES * len(names)


# --- members that are about to leave, or come back ------------------------------------------------


@pytest.mark.parametrize("stops_in_s", [10.0, 30.0])
@linked()
async def test_a_member_that_stops_its_workers_can_answer(job: SimJob, stops_in_s: float) -> None:
    """Its round is over, and the one that watches it now has never reached it: it is asked, and is
    no newcomer for that."""
    before, dead, slow, _ = (node.name for node in by_rank(job))
    job.network.cut(place(before), place(slow))
    await job.pass_time(30.0)
    job.nodes[slow].stops_in_s = stops_in_s
    job.kill(dead)
    await job.until_works([name for name in "abcd" if name != dead], limit_s=60.0)
    await job.pass_time(60.0)
    assert any(slow in line.split("accuses")[1] for line in accused_in(job))
    assert restarts(job) == 3


@linked(min_nodes=1)
async def test_members_that_stop_their_workers_while_they_cannot_see_each_other(
    job: SimJob,
) -> None:
    """One of them is back at once, and would be enough for a world of its own."""
    await job.pass_time(TTL_S)
    first = by_rank(job)[0]
    for node in job.nodes.values():
        node.stops_in_s = 0.0 if node is first else 20.0
    cut_apart(job, "abcd")
    job.rejoin(first)
    await job.pass_time(12.0)
    job.network.heal()
    await job.until_works("abcd", limit_s=60.0)
    await job.pass_time(60.0)
    assert accused_in(job)
    assert restarts(job) == 4


@linked("abc")
async def test_a_member_that_is_back_after_a_while_is_watched_again(job: SimJob) -> None:
    cut_apart(job, "abc")
    job.cut(job.nodes.values())
    job.revoke([node.lease_id for node in job.nodes.values()])
    await job.pass_time(TTL_S + 2.0)
    job.network.heal()
    job.heal("ac")
    await job.pass_time(4.0)
    job.nodes["b"].connection.link.heal()
    await job.pass_time(2 * TTL_S)
    assert restarts(job) == 0
    job.kill("b")
    assert await known_after_s(job) < KNOWN_S


@simulated(min_nodes=2, max_nodes=3, peer_links=True)
async def test_a_member_that_was_absent_for_a_moment_is_watched_all_the_same(job: SimJob) -> None:
    """Its lease was taken while its neighbor looked where to find it."""
    await job.all_work("abc")
    b = job.nodes["b"]
    b.connection.link.partition()
    job.revoke([b.lease_id])
    await job.pass_time(1.0)
    b.connection.link.heal()
    await job.pass_time(2 * ESTABLISHED_S)
    assert restarts(job) == 0
    job.kill("b")
    assert await known_after_s(job) < KNOWN_S


@linked(min_nodes=4)
async def test_one_that_was_lost_and_came_back_is_watched_as_before(job: SimJob) -> None:
    """Two were cut off at once, so the change names one of them only; their accusers were right
    about both."""
    await job.pass_time(TTL_S)
    cut_off(job, "b")
    cut_off(job, "d")
    await known_after_s(job, "b", "d")
    await job.pass_time(8.0)
    job.network.heal()
    job.nodes["b"].connection.link.heal()
    cut_off(job, "d")
    await job.pass_time(10.0)
    job.network.heal()
    job.nodes["d"].connection.link.heal()
    await job.until_works("abcd")
    await job.pass_time(5.0)
    job.kill(job.loop.rng.choice("bd"))
    # Since the cut etcd seems farther away than it is, which is time to answer.
    assert await known_after_s(job) < TTL_S / 2


# --- links that cannot be had, or kept ------------------------------------------------------------


def test_links_that_fail_unexpectedly_end_no_node(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: object) -> Contact:
        raise ZeroDivisionError("a defect")

    async def scenario(job: SimJob) -> None:
        node = job.start("a")
        assert node.peer is not None
        node.peer.connect = broken  # type: ignore[assignment, method-assign]
        job.start_all("bc")
        await job.until_works("abc")
        await job.pass_time(30.0)
        assert restarts(job) == 0
        job.crash("a")
        await job.until_works("bc")

    simulate(scenario, range(1), min_nodes=2, max_nodes=3, peer_links=True)
    assert any("continues without its task 'peer links'" in line for line in caplog.messages)


def test_a_member_that_cannot_be_reached_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        job.network.refuse(place("b"))
        await formed(job, "ab")
        await job.pass_time(60.0)
        assert restarts(job) == 0
        assert not accused_in(job)

    simulate(scenario, range(1), min_nodes=2, max_nodes=2, peer_links=True)
    (line,) = [text for text in caplog.messages if "cannot reach" in text]
    assert "a: this node cannot reach b at 10.0.0.b:" in line
    assert Answer.REFUSED.value in line
    assert "MASTER_ADDR" in line


@linked("abc", range(3))
async def test_links_that_break_as_soon_as_they_are_made_are_made_less_and_less_often(
    job: SimJob,
) -> None:
    """As those of too many that watch one node would."""
    job.network.break_new_links(True)
    await job.pass_time(60.0)
    assert 3 * 3 < job.network.broken < 3 * 60
    job.network.break_new_links(False)
    assert restarts(job) == 0
    job.kill("b")
    assert await known_after_s(job) < TTL_S


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
    seen = LinkSeen(Contact(answer), was_linked=linked, fell_silent=fell_silent)
    assert seen.evidence(others_are_gone=others) is evidence


# --- what would be missed without its guard -------------------------------------------------------


async def _no_second_look(self: PeerWatch, info: NodeInfo) -> Contact:
    return Contact(Answer.REFUSED, "not asked")


def _never_quiet(self: LocalHealth, node_id: str, now_s: float) -> float:
    return 0.0


def _unguarded(
    keys: JobKeys, node_id: str, presence: KeyValue, accusation: Accusation, session: int
) -> Txn:
    return Txn((), (Put(keys.node(node_id), values.encode_accusation(accusation), session),))


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_node_that_has_no_session_just_then_accuses_nobody(job: SimJob) -> None:
    """What it wrote would be on no lease, and would stay when the whole job has gone."""
    a, b = await job.all_work("ab")
    context, key = a.node.context, job.keys.node(b.node_id)
    (presence,) = [kv for kv in job.server.snapshot() if kv.key == key]

    async def accuse_b() -> bool:
        context.session.lost(context.session.lease_id)
        accusation = Accusation(a.node_id, "gone", True)
        return await Accuser(context).accuse(b.node_id, presence, accusation)

    is_made: bool = await job.on(a, accuse_b())
    assert not is_made
    assert presence in job.server.snapshot()


async def _stays(self: Accuser) -> None:
    """Withdraw nothing."""


async def _trusts_the_answer(
    etcd: Etcd, keys: JobKeys, presence: KeyValue, accusation: Accusation, lease_id: int
) -> int:
    txn = requests.accuse(keys, keys.node_id(presence.key), presence, accusation, lease_id)
    result = await etcd.txn(txn, repeatable=True)
    return result.revision if result.succeeded else 0


@pytest.mark.parametrize(
    ("where", "name", "by", "noticed_by"),
    [
        (
            PeerWatch,
            "_recontact",
            _no_second_look,
            partial(test_links_that_all_break_at_once_are_there_again, lost=0),
        ),
        (
            LocalHealth,
            "quiet_until_s",
            _never_quiet,
            test_a_node_that_was_wrong_is_quiet_for_a_while,
        ),
        (liveness, "ANSWER_GRACE_S", 0.0, test_members_that_all_refuse_each_other_answer),
        (
            liveness,
            "ABSENCE_GRACE_S",
            0.0,
            partial(test_members_that_cannot_see_each_other_answer, busy=True),
        ),
        (
            Accuser,
            "withdraw",
            _stays,
            partial(test_an_accusation_does_not_outlive_its_round, fails=False),
        ),
        (requests, "accuse", _unguarded, test_an_accusation_that_comes_late_is_refused),
        (
            accuse,
            "put_accusation",
            _trusts_the_answer,
            test_an_accusation_whose_answer_was_lost_is_known_to_its_maker,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_each_guard_is_missed(
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    by: object,
    noticed_by: Callable[[], None],
) -> None:
    monkeypatch.setattr(where, name, by)
    with pytest.raises((AssertionError, InvariantError)):
        noticed_by()
