"""etcd refuses a node for a while: permission, user, TLS. Who belongs to the job waits and says so;
a newcomer is told at once. In virtual time; out of space is ``test_no_space.py``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import pytest

from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdTlsError,
    JoinTimeoutError,
)
from rdzv_etcd.etcd.port import Delete, Get, Put, Txn, prefix_end
from rdzv_etcd.protocol.keys import KeyRange
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Grant, Request
from tests.sim.world import TIMING, TTL_S, SimJob, SimNode, simulated
from tests.support.roles import Lack, set_lacks

REFUSALS = [EtcdPermissionError, EtcdAuthError, EtcdTlsError]


def refuse(node: SimNode, kind: type[EtcdError] | None) -> None:
    node.connection.link.refuse(None if kind is None else lambda: kind("refused for a while"))


def begin_refusals(job: SimJob, nodes: Iterable[SimNode], kind: type[EtcdError]) -> None:
    """Let etcd refuse these nodes what they ask; if it has no space left, it refuses all writes."""
    if kind is EtcdNoSpaceError:
        job.server.set_no_space(True)
    else:
        for node in nodes:
            refuse(node, kind)


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_a_node_that_may_not_read_who_is_there_says_so_while_it_waits(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    """With the command that mends it, and not only when its time is up."""
    caplog.clear()
    job.start("a")
    await job.pass_time(1.0)
    set_lacks(job.server, Lack(job.keys.nodes.start, job.keys.nodes.end, writes=False))
    late = job.start("b")
    await job.pass_time(12.0)
    assert late.error is None
    (line,) = [line for line in warnings_of(caplog, late) if "waiting 1" in line]
    assert "which does not show which nodes are there" in line
    assert f"grant-permission ROLE --prefix=true readwrite {job.keys.root.decode()}" in line
    set_lacks(job.server)
    job.start("c")
    await job.until_works("abc", 60.0)


def warnings_of(caplog: pytest.LogCaptureFixture, node: SimNode) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and f" {node.name}: " in record.getMessage()
    ]


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("lasts_s", [2.0, 200.0])
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_member_that_is_refused_while_it_joins_again_tries_on(
    job: SimJob, kind: type[EtcdError], lasts_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    await job.all_work("ab")
    node = job.followers()[0]
    caplog.clear()
    refuse(node, kind)
    job.rejoin(node)
    await job.pass_time(lasts_s)
    assert node.error is None
    assert "refused for a while" in "".join(warnings_of(caplog, node))
    refuse(node, None)
    await job.until_works("ab", 10.0)


@simulated(range(8), min_nodes=2, max_nodes=3, slice_nodes=2)
async def test_a_refusal_that_is_over_does_not_end_the_wait_of_a_spare(job: SimJob) -> None:
    """It was refused its part of the ranks, and read it then: it has nothing to ask for."""
    await job.all_work("abc")
    spare = job.start("d")
    await job.pass_time(1.0)
    refuse(spare, EtcdAuthError)
    job.rejoin(job.followers()[0])
    await job.until_works("abc", 30.0)
    await job.pass_time(2.0)
    refuse(spare, None)
    await job.pass_time(2 * TIMING.join_timeout_s)
    assert spare.error is None, spare.error
    job.crash(job.followers()[0].name)
    await job.until(lambda: spare.is_working, "the spare has a seat", 60.0)


@pytest.mark.parametrize("kind", REFUSALS)
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_member_that_is_refused_after_it_saw_an_unreadable_value_tries_on(
    job: SimJob, kind: type[EtcdError]
) -> None:
    """The value is put right behind its back: it hears of that only when etcd lets it read."""
    await job.all_work("ab")
    node = job.followers()[0]
    job.server.apply(Txn((), (Put(job.keys.change, b"?"),)))
    await job.until(lambda: node.node.context.control.problem is not None, "it is seen")
    node.connection.link.lag_watches(30.0)
    job.server.apply(Txn((), (Delete(job.keys.change),)))
    refuse(node, kind)
    job.rejoin(node)
    await job.pass_time(5.0)
    assert node.error is None
    refuse(node, None)
    await job.until_works("ab", 40.0)


@pytest.mark.parametrize("kind", [*REFUSALS, EtcdNoSpaceError])
@pytest.mark.parametrize("members", ["ab", "a"], ids=["a spare", "the first to wait for a round"])
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_node_that_waits_and_must_arrive_again_waits_too(
    job: SimJob, members: str, kind: type[EtcdError]
) -> None:
    """It was no member, but others count on it."""
    job.start_all(members)
    await job.pass_time(1.0)
    waiter = job.start("s") if members == "ab" else job.nodes["a"]
    await job.pass_time(5.0)
    begin_refusals(job, [waiter], kind)
    job.server.expire(waiter.lease_id)
    await job.pass_time(100.0)
    assert waiter.error is None
    job.server.set_no_space(False)
    refuse(waiter, None)
    await job.pass_time(10.0)
    if members == "ab":
        job.crash(job.leader.name)
    else:
        job.start("b")
    await job.until(lambda: waiter.is_working, "it gets a seat", 100.0)


@pytest.mark.parametrize("kind", [*REFUSALS, EtcdNoSpaceError])
@pytest.mark.parametrize("connected", [True, False])
@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_a_newcomer_is_refused_at_once(
    job: SimJob, kind: type[EtcdError], connected: bool
) -> None:
    """Whether or not it has a session already, from before the refusals."""
    late = job.make("late")
    if connected:
        await job.on(late, late.node.start())
    begin_refusals(job, [late], kind)
    began_s = job.loop.time()
    await job.on(late, late.run())
    assert isinstance(late.error, kind)
    assert job.loop.time() - began_s < 1.0


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "no last answer"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [(EtcdPermissionError, "refused for a while"), (EtcdNoSpaceError, "etcdctl alarm disarm")],
)
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_the_wait_ends_with_the_join_timeout_and_the_cause(
    job: SimJob, kind: type[EtcdError], cause: str, is_answered: bool
) -> None:
    """Also if the last try gets no answer any more."""
    job.start_all("ab", join_timeout_s=60.0)
    await job.until_works("ab")
    begin_refusals(job, job.nodes.values(), kind)
    for node in job.nodes.values():
        job.rejoin(node)
    began_s = job.loop.time()
    await job.pass_time(55.0)
    if not is_answered:
        job.cut(job.nodes.values(), silent=True)
    await job.until(lambda: all(n.error for n in job.nodes.values()), "they give up", 25.0)
    assert job.loop.time() - began_s > 55.0
    for node in job.nodes.values():
        assert isinstance(node.error, kind)
        assert "within 60 s" in str(node.error)
        assert cause in str(node.error)


@pytest.mark.parametrize("joins_again", [True, False])
@simulated(range(2), min_nodes=2, max_nodes=2)
async def test_a_node_that_is_refused_asks_about_as_often_as_it_renews_its_lease(
    job: SimJob, joins_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """While it joins, and while it works and wants to put its presence back; and warns once."""
    await job.all_work("ab")
    await job.pass_time(2.0 * TTL_S)
    node = job.followers()[0]
    asked: list[Applied] = []
    caplog.clear()
    job.server.set_no_space(True)  # seen by the server, so that it can be counted
    job.server.observers.append(asked.append)
    if joins_again:
        job.rejoin(node)
    else:
        job.server.expire(node.lease_id)
    await job.pass_time(100.0 * TTL_S)
    job.server.observers.remove(asked.append)
    writes = [
        each
        for each in asked
        if each.source == node.node_id and isinstance(each.request, Txn | Grant)
    ]
    assert 100 < len(writes) < 2 * 3 * 100  # a lease is granted, perhaps, and the rest refused
    job.server.set_no_space(False)


# -- a role that lacks what only a leader does ----------------------------------------------------


def deny(node: SimNode, matching: Callable[[Request], bool]) -> None:
    """As for a user whose role lacks some keys of the job's; more often than anybody asks."""
    node.connection.link.fail(EtcdPermissionError("denied by its role"), 10**6, matching)


def reads_nodes(job: SimJob) -> Callable[[Request], bool]:
    return lambda request: isinstance(request, Get) and request.key == job.keys.nodes.start


def writes_record(job: SimJob) -> Callable[[Request], bool]:
    def matches(request: Request) -> bool:
        puts = request.success if isinstance(request, Txn) else ()
        return any(isinstance(op, Put) and op.key == job.keys.round for op in puts)

    return matches


LEADERS_PART = [reads_nodes, writes_record]


@pytest.mark.parametrize("part", LEADERS_PART)
@simulated(range(3), min_nodes=1, max_nodes=2)
async def test_a_newcomer_whose_role_does_not_let_it_lead_ends_and_another_leads(
    job: SimJob,
    part: Callable[[SimJob], Callable[[Request], bool]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Waiting for the lead of such a node, all would be told in the end that nobody came."""
    node = job.make("a")
    deny(node, part(job))
    began_s = job.loop.time()
    await job.on(node, node.run())
    assert isinstance(node.error, EtcdPermissionError)
    assert job.loop.time() - began_s < TIMING.last_call_timeout_s + 10.0
    assert "this node cannot lead: denied by its role" in "".join(warnings_of(caplog, node))
    assert "cannot lead the job: denied by its role" in str(node.error)
    assert f"readwrite {job.keys.root.decode()}" in str(node.error)
    job.start("b")
    await job.until_works("b", 40.0)


@pytest.mark.parametrize("part", LEADERS_PART)
@simulated(range(3), min_nodes=1, max_nodes=2)
async def test_a_member_whose_role_does_not_let_it_lead_any_more_waits_and_says_so(
    job: SimJob,
    part: Callable[[SimJob], Callable[[Request], bool]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    job.start_all("ab", join_timeout_s=100.0)
    await job.until_works("ab")
    nodes = list(job.nodes.values())
    for node in nodes:
        deny(node, part(job))
    caplog.clear()
    job.crash(job.leader.name)
    left = next(node for node in nodes if node.alive)
    job.rejoin(left)
    await job.pass_time(TTL_S + 10.0)
    (waits,) = (each for each in warnings_of(caplog, left) if "waiting up to" in each)
    assert "cannot lead the job: denied by its role" in waits
    await job.until(lambda: left.error is not None, "it gives up", 200.0)
    assert isinstance(left.error, EtcdPermissionError)
    assert "within 100 s: cannot lead the job: denied by its role" in str(left.error)


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_a_node_that_may_not_see_who_is_there_says_so_when_it_gives_up(job: SimJob) -> None:
    """Another one leads. A refusal is an answer: not "etcd does not answer"."""
    job.start("a")
    await job.until(lambda: job.nodes["a"].node.leads, "it leads")
    node = job.make("b", join_timeout_s=30.0)
    deny(node, reads_nodes(job))
    await job.on(node, node.run())
    assert isinstance(node.error, JoinTimeoutError)
    assert "who is there is not known: denied by its role" in str(node.error)
    assert "does not answer" not in str(node.error)


class Edit:
    """A role that lacks the read of the presences, until the edit is over."""

    def __init__(self, job: SimJob, nodes: Sequence[SimNode]) -> None:
        self.is_over = False
        reads = reads_nodes(job)
        for node in nodes:
            deny(node, lambda request: not self.is_over and reads(request))


@simulated(range(3), min_nodes=4, max_nodes=4)
async def test_a_role_that_is_edited_while_newcomers_wait_for_one_more_ends_nobody(
    job: SimJob,
) -> None:
    """The leader's watch breaks just then, and it may not read again."""
    nodes = job.start_all("abc")
    await job.pass_time(20.0)
    for node in nodes:
        refuse(node, EtcdPermissionError)
    job.server.restart(0.1)
    await job.pass_time(3.0)
    for node in nodes:
        refuse(node, None)
    await job.pass_time(5.0)
    job.start("d")
    await job.until_works("abcd", 60.0)


@simulated(range(3), min_nodes=5, max_nodes=5)
async def test_a_role_that_is_edited_while_a_waiting_leader_leaves_ends_nobody(job: SimJob) -> None:
    nodes = job.start_all("abcd")
    await job.pass_time(20.0)
    leader = job.leader
    others = [node for node in nodes if node is not leader]
    edit = Edit(job, others)
    await job.leave(leader.name)
    await job.pass_time(3.0)
    edit.is_over = True
    job.start_all("ef")
    await job.until_works([*(node.name for node in others), "e", "f"], 60.0)


@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_a_role_that_is_edited_while_the_only_member_dies_ends_no_spare(job: SimJob) -> None:
    """Not even if that takes long: there was a round, so the role has been right."""
    await job.all_work("a")
    spares = job.start_all("rst")
    await job.pass_time(300.0)
    edit = Edit(job, spares)
    job.crash("a")
    await job.pass_time(10 * TTL_S)
    edit.is_over = True
    await job.until(lambda: any(node.is_working for node in spares), "a spare works", 60.0)
    assert not [node.error for node in spares if node.error]


@simulated(range(3), min_nodes=2, max_nodes=3)
async def test_newcomers_of_whom_none_may_lead_are_all_told(job: SimJob) -> None:
    """In turn: each next one waits for a while, as the role may just be edited."""
    nodes = [job.make(name) for name in "abc"]
    for node in nodes:
        deny(node, reads_nodes(job))
    began_s = job.loop.time()
    await asyncio.gather(*(job.on(node, node.run()) for node in nodes))
    assert job.loop.time() - began_s < 10 * TTL_S
    for node in nodes:
        assert isinstance(node.error, EtcdPermissionError)
        assert f"readwrite {job.keys.root.decode()}" in str(node.error)


# --- a role that is edited while a job works ------------------------------------------------------


def lacking(job: SimJob, what: str, *, renewals: bool) -> Lack:
    """What the role lacks: everything of the job, or one part of it."""
    keys = job.keys
    parts = {
        "everything": KeyRange(keys.root, prefix_end(keys.root)),
        "presences": keys.nodes,
        "control keys": keys.control,
    }
    return Lack(parts[what].start, parts[what].end, renewals=renewals)


@pytest.mark.parametrize("what", ["everything", "presences", "control keys"])
@pytest.mark.parametrize("lasts_s", [2.0, 2.5 * TTL_S, 300.0])
@pytest.mark.parametrize("renewals", [False, True])
@simulated(range(6), min_nodes=2, max_nodes=3)
async def test_a_role_that_is_edited_restarts_nothing(
    job: SimJob, what: str, lasts_s: float, renewals: bool
) -> None:
    """Newer versions of etcd renew no lease whose keys may not be written: then all run out."""
    job.start_all("abc", delay_s=0.02)
    await job.until_works("abc")
    await job.pass_time(job.loop.rng.uniform(0, TTL_S))
    set_lacks(job.server, lacking(job, what, renewals=renewals))
    await job.pass_time(lasts_s)
    set_lacks(job.server)
    await job.pass_time(3 * TTL_S)
    assert [node.joins for node in job.nodes.values()] == [1, 1, 1], job.tell()
    assert job.works("abc"), job.tell()
    job.crash("b")
    await job.until_works("ac", 3 * TTL_S)
