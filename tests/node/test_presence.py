"""A node's presence: what takes it away, and what must not overwrite it."""

from __future__ import annotations

from rdzv_etcd.etcd.port import Delete, Txn
from rdzv_etcd.protocol.member import Phase
from tests.sim.matching import puts
from tests.sim.world import TTL_S, SimJob, simulated


@simulated(min_nodes=2, max_nodes=3)
async def test_a_late_copy_of_a_presence_put_back_does_not_overwrite_a_new_arrival(
    job: SimJob,
) -> None:
    """A member puts its presence back and arrives again before its leader sees either; a copy of
    the first write comes after the second one."""
    await job.all_work("abc")
    leader, member = job.leader, job.followers()[0]
    presence = job.keys.node(member.node_id)

    def is_there() -> bool:
        return any(kv.key == presence for kv in job.server.snapshot())

    leader.connection.link.partition(silent=True)
    member.connection.link.repeat_requests(1.5, 1, puts(presence))
    job.server.expire(member.lease_id)
    await job.until(is_there, "the presence is back", TTL_S / 2)
    job.rejoin(member)
    await job.pass_time(2.0)
    leader.connection.link.heal()
    await job.until_works("abc", 30)


@simulated(min_nodes=3, max_nodes=3)
async def test_a_waiting_node_whose_presence_was_deleted_arrives_again(job: SimJob) -> None:
    """Its lease lives, so no keep-alive tells."""
    a, b = job.start_all("ab")
    await job.pass_time(job.loop.rng.choice([0.5, TTL_S / 2, 3 * TTL_S]))
    assert a.node.phase is b.node.phase is Phase.WAITING
    victim = job.loop.rng.choice([a, b])
    job.server.apply(Txn((), (Delete(job.keys.node(victim.node_id)),)), "operator")
    await job.pass_time(TTL_S)
    job.start("c")
    await job.until_works("abc", 5)


@simulated(min_nodes=3, max_nodes=3)
async def test_everything_deleted_under_living_nodes_restarts_nothing(job: SimJob) -> None:
    """An operator's ``etcdctl del --prefix``: leases and lives go on, the keys come back."""
    nodes = await job.all_work("abc")
    spare = job.start("d")
    await job.pass_time(2 * TTL_S)
    everything = job.keys.below
    job.server.apply(Txn((), (Delete(everything.start, everything.end),)), "operator")
    await job.pass_time(5 * TTL_S)
    job.assert_undisturbed("abc")
    job.crash(nodes[0].name)
    await job.until_works("bcd", 2 * TTL_S)
    assert spare.joins == 1
