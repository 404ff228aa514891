"""What others write under a living job's keys: told, with its key, and otherwise borne.

In virtual time; each scenario runs under several seeds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable

import pytest

from rdzv_etcd.errors import JoinTimeoutError, StateCorruptError
from rdzv_etcd.etcd.port import Delete, KeyValue, Op, Put, Txn
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.fields import MAX_EPOCH
from rdzv_etcd.protocol.model import Closure, Round
from rdzv_etcd.protocol.requests import read_slice
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_ROUND
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Grant
from tests.node.test_refusals import warnings_of
from tests.sim.world import TIMING, TTL_S, SimJob, SimNode, simulate, simulated

SOON_S = 1.0
SEEDS = range(5)


def write(job: SimJob, *ops: Op) -> None:
    """Somebody who may write to the job's keys does so."""
    job.server.apply(Txn((), ops))


def presence(**fields: object) -> bytes:
    """Nearly a presence."""
    whole = {
        "v": 1,
        "address": "10.0.0.9",
        "port": 20000,
        "arrived_for": 1,
        "settings": {"min_nodes": 1, "max_nodes": 4, "node_unit": 1},
        **fields,
    }
    return json.dumps(whole).encode()


OTHERS = {"min_nodes": 9, "max_nodes": 9, "node_unit": 1}
HOSTILE = {
    "nothing": b"",
    "a pickle": b"\x80\x04\x95",
    "another version": b'{"v":2}',
    "deep": b'{"v":1,"address":' + b"[" * 50_000,
    "not a number": presence(port=float("nan")),
    "a field twice": b'{"v":1,"v":1}',
    "many digits": b'{"v":1,"port":' + b"9" * 5000 + b"}",
    "a rank key of 5000 digits": presence(rank_key="9" * 5000),
    "half a character": presence(rank_key="\ud800"),
    "an escape sequence": presence(address="\x1b[2J"),
    "no port": presence(port=0),
    "the last epoch": presence(epoch_seen=2**63 - 1),
    "the last round": presence(arrived_for=2**63 - 1),
    "no lease": presence(),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_an_unreadable_presence_is_a_stranger_that_nobody_waits_for(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """There before the job or put while it lives; losses are noticed, newcomers taken in."""

    async def scenario(job: SimJob) -> None:
        write(job, Put(job.keys.node("before"), value))
        await job.all_work("ab")
        write(job, Put(job.keys.node("later~1~x"), value))
        job.start("c")
        await job.until_works("abc", 5)
        lost = job.followers()[0].name
        job.crash(lost)
        await job.until_works("abc".replace(lost, ""), TTL_S + 2)
        leader = job.leader.name
        await job.leave(leader)  # the next one sees them, too
        await job.until_works("abc".replace(lost, "").replace(leader, ""), 5)

    simulate(scenario, range(2), min_nodes=1, max_nodes=3)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(line.isprintable() for line in warned)
    assert any("nodes/before" in line and "without a lease" in line for line in warned)
    assert any("nodes/later~1~x" in line for line in warned)


def test_ten_thousand_unreadable_presences_are_told_in_a_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        for start in range(0, 10_000, 100):
            keys = [job.keys.node(f"n{number}") for number in range(start, start + 100)]
            write(job, *(Put(key, b"?") for key in keys))
        await job.all_work("ab")

    simulate(scenario, [1], min_nodes=2, max_nodes=2)
    assert 1 < len([record for record in caplog.records if record.levelno == logging.WARNING]) < 12


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_member_whose_presence_was_overwritten_puts_it_back_and_nobody_is_disturbed(
    job: SimJob,
) -> None:
    nodes = await job.all_work("abc")
    await job.pass_time(TTL_S)
    victim = job.loop.rng.choice(nodes)
    for value in (b"?", presence(), presence(arrived_for=2)):
        write(job, Put(job.keys.node(victim.node_id), value))
        await job.pass_time(TTL_S)
        (kv,) = job.server.snapshot(job.keys.node(victim.node_id))
        assert kv.lease_id == victim.lease_id
    job.assert_undisturbed("abc")


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_member_is_lost_although_somebody_has_put_a_value_in_its_place(job: SimJob) -> None:
    await job.all_work("abc")
    await job.pass_time(TTL_S)
    victim = job.loop.rng.choice(job.followers())
    job.crash(victim.name)
    write(job, Put(job.keys.node(victim.node_id), b"?"))
    await job.pass_time(TTL_S + 1)
    write(job, Put(job.keys.node(victim.node_id), b"!"))
    others = "abc".replace(victim.name, "")
    await job.until_works(others, TTL_S)
    assert all(job.nodes[name].joins == 2 for name in others)


CONTROL = pytest.mark.parametrize("which", ["round", "leader", "change"])


@CONTROL
@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_an_unreadable_control_value_is_told_once_read_rarely_and_forgotten_when_it_is_mended(
    job: SimJob, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Members work on meanwhile; each looks again when the key changes, and about as often as it
    renews its lease."""
    caplog.clear()
    nodes = await job.all_work("abc")
    await job.pass_time(2 * TTL_S)
    key = getattr(job.keys, which)
    (before,) = job.server.snapshot(key) or (None,)
    write(job, Put(key, b"\x1b[2J?"))
    await job.pass_time(SOON_S)
    reads = job.server.requests["Get"]
    for _ in range(20):  # it changes, but it stays what it is: nobody has to read that
        write(job, Put(key, b"??"))
        await job.pass_time(2.0)
    assert job.server.requests["Get"] - reads < 40 / (TTL_S / 3) * len(nodes) * 1.5
    assert [node.joins for node in nodes] == [1, 1, 1]
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert {record.getMessage().count(key.decode()) for record in told} == {1}
    assert len(told) <= len(nodes) + 1  # the leader says what that means to it
    with pytest.raises(StateCorruptError, match=key.decode()) as caught:
        await job.on(nodes[0], job.make("d").join())
    assert "without a lease" in str(caught.value)

    if before is None or which == "leader":
        write(job, Delete(key))
    else:
        write(job, Put(key, before.value, before.lease_id))
    lost = job.followers()[-1] if which != "leader" else nodes[0]
    await job.pass_time(SOON_S)
    job.crash(lost.name)
    await job.until_works("abc".replace(lost.name, ""), TTL_S + 3)


def overwrite_record(job: SimJob, **fields: object) -> KeyValue:
    """Somebody writes nearly the job's record; return the true one."""
    (before,) = job.server.snapshot(job.keys.round)
    value = json.dumps({**json.loads(before.value), **fields}).encode()
    write(job, Put(job.keys.round, value, before.lease_id))
    return before


@pytest.mark.parametrize("field", ["epoch", "epoch_base"])
@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_record_of_the_highest_epoch_that_is_read_is_followed_by_another(
    job: SimJob, field: str
) -> None:
    nodes = await job.all_work("ab")
    await job.pass_time(2 * TTL_S)
    overwrite_record(job, **{field: MAX_EPOCH})
    await job.until(lambda: all(node.joins == 2 for node in nodes), "they join again", 5)
    await job.until_works("ab", 5)
    assert all(node.world.epoch >= MAX_EPOCH for node in nodes if node.world is not None)


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_record_of_the_last_round_says_that_no_other_can_follow_it(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody writes one that could not be read: then one node would work in a world that no other
    knows. All wait, and their leader says why, until the record is gone."""
    caplog.clear()
    closure = Closure("x", "a stranger's", True, 1.0)
    settings = JobSettings(2, 3)
    last = Round(MAX_ROUND, "r", ("x",), settings, "h", 1, 4711, closure=closure)
    job.server.apply(Grant(3600, 4711))
    write(job, Put(job.keys.round, values.encode_round(last), 4711))
    job.start_all("ab")
    impatient = job.start("c", join_timeout_s=1.5 * TTL_S)
    await job.pass_time(2 * TTL_S)
    assert isinstance(impatient.error, JoinTimeoutError)
    assert "no round can follow" in str(impatient.error)
    (kv,) = job.server.snapshot(job.keys.round)
    assert values.decode_round(kv.key, kv.value) == last
    for name in "abc":  # not only the leader
        told = warnings_of(caplog, job.nodes[name])
        assert any("ctl/round" in line and "no round can follow" in line for line in told)
    write(job, Delete(job.keys.round))
    await job.until_works("ab", TIMING.last_call_timeout_s + TTL_S + 3)


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_foreign_leader_is_replaced_as_soon_as_its_key_is_deleted(job: SimJob) -> None:
    """Also if it was there before anybody came, or came with the leader's end."""
    await job.all_work("abc")
    write(job, Put(job.keys.leader, b"?"))
    lost = job.loop.rng.choice("abc")
    job.crash(lost)
    await job.pass_time(3 * TTL_S)
    write(job, Delete(job.keys.leader))
    await job.until_works("abc".replace(lost, ""), TTL_S + 3)


def slice_key(job: SimJob, node_id: str) -> bytes:
    """Where this member of a large world finds its rank."""
    record = job.nodes[node_id[0]].node.context.control.view.round
    assert record is not None
    assert record.slices is not None
    return read_slice(job.keys, record, record.slices, node_id).key


def slices_of(job: SimJob, nodes: Iterable[SimNode]) -> dict[bytes, KeyValue]:
    keys = sorted({slice_key(job, node.node_id) for node in nodes})
    return {kv.key: kv for key in keys for kv in job.server.snapshot(key)}


SPOIL = pytest.mark.parametrize(
    "spoil",
    [
        lambda kv: Put(kv.key, b"nonsense", kv.lease_id),
        lambda kv: Put(kv.key, b"nonsense"),
        lambda kv: Delete(kv.key),
    ],
    ids=["nonsense", "for ever", "nothing"],
)


@SPOIL
@pytest.mark.parametrize("whose", ["the leader's", "another one's", "all"])
@simulated(range(10), min_nodes=2, max_nodes=4, slice_nodes=3)
async def test_members_put_back_a_slice_that_a_new_leader_cannot_read(
    job: SimJob, whose: str, spoil: Callable[[KeyValue], Op]
) -> None:
    """Then who is lost is told as soon as ever; after a TTL if nobody is left who has read it."""
    await job.all_work("abcd")
    await job.pass_time(2 * TTL_S)
    leader, other = job.leader, job.loop.rng.choice(job.followers())
    rest = "abcd".replace(leader.name, "")
    spoilt = {"the leader's": [leader], "another one's": [other], "all": [*job.nodes.values()]}
    before = slices_of(job, spoilt[whose])
    write(job, *map(spoil, before.values()))
    readers = [n for n in job.followers() if slice_key(job, n.node_id) in before]
    is_read = len({slice_key(job, n.node_id) for n in readers}) == len(before)
    await job.pass_time(SOON_S)
    assert all(node.is_working and node.joins == 1 for node in job.nodes.values())
    job.crash(leader.name)
    await job.until_works(rest, TTL_S + 2 if is_read else 2 * TTL_S + 2)
    assert all(job.nodes[name].joins == 2 for name in rest)


@SPOIL
@simulated(range(10), min_nodes=2, max_nodes=4, slice_nodes=3)
async def test_waiting_members_put_back_a_slice_that_a_new_leader_cannot_read(
    job: SimJob, spoil: Callable[[KeyValue], Op]
) -> None:
    """The leader dies while the round is open, and its slice and the others' are spoilt."""
    await job.all_work("abcd")
    await job.pass_time(2 * TTL_S)
    write(job, *map(spoil, slices_of(job, job.nodes.values()).values()))
    leader = job.leader
    victim = job.loop.rng.choice(job.followers())
    await job.leave(victim.name)
    await job.pass_time(job.loop.rng.uniform(0, 0.02))
    job.crash(leader.name)
    rest = "abcd".replace(leader.name, "").replace(victim.name, "")
    await job.until_works(rest, 2 * TTL_S + 5)


@simulated(range(10), min_nodes=2, max_nodes=4, slice_nodes=3)
async def test_a_new_leader_asks_once_for_a_slice_that_nobody_can_put_back(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    """All who were in it have gone with the leader; it is told, and the others go on."""
    caplog.clear()
    await job.all_work("abcd")
    await job.pass_time(2 * TTL_S)
    leader = job.leader
    (mine,) = slices_of(job, [leader]).values()
    gone = [n for n in job.nodes.values() if slice_key(job, n.node_id) == mine.key]
    rest = "".join(sorted({*"abcd"} - {node.name for node in gone}))
    if len(rest) < 2:
        return
    write(job, Put(mine.key, b"nonsense"))
    records: list[Applied] = []
    job.server.observers.append(
        lambda applied: records.append(applied) if puts_record(job, applied) else None
    )
    job.crash(*(node.name for node in gone))
    await job.until_works(rest, 2 * TTL_S + 2)
    assert len(records) == 2  # to ask, and the next round
    told = [record.getMessage() for record in caplog.records]
    asked = [line for line in told if "asks for the members of round 1" in line]
    assert len(asked) == 1
    assert mine.key.decode() in asked[0]


def puts_record(job: SimJob, applied: Applied) -> bool:
    events = (event for revision in applied.changes for event in revision.events)
    return any(event.kv.key == job.keys.round and event.kv.value for event in events)
