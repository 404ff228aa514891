"""A user's program that uses every public name of the blocking face, for mypy and for real.

``python -m tests.typed.blocking etcd-host:2379 job`` runs it. What a type checker shall refuse is
marked ``type: ignore``: mypy tells if it does not refuse it any more.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

from typing_extensions import assert_never, assert_type

import rdzv_etcd
from rdzv_etcd.errors import (
    BarrierTimeoutError,
    EtcdUnavailableError,
    JobClosedError,
    JoinTimeoutError,
    RdzvEtcdError,
    StoreTimeoutError,
    WorldOverError,
)


def main(endpoints: str, job: str) -> None:
    with rdzv_etcd.connect(
        endpoints,
        job=job,
        nodes=1,
        data={"gpus": 8},
        local_addr="127.0.0.1",
        lease_ttl=5,
        gate_command="true",
    ) as group:
        assert_type(group, rdzv_etcd.Group)
        assert_type(group.job, str)
        assert_type(group.node_id, str)
        assert_type(group.waiting_count(), int)
        assert_type(group.closure(), rdzv_etcd.Closure | None)
        assert_type(group.has_left, bool)
        group.when_left(lambda: None)
        assert_type(group.drain_reason, str | None)
        with group.events() as events:
            assert_type(events, rdzv_etcd.JobEvents)
            first = events.next(timeout_s=60)
            assert_type(first, "rdzv_etcd.JobEvent | None")
            assert isinstance(first, rdzv_etcd.Snapshot)
        for world in group.worlds():
            in_world(world)
            observed(endpoints, job)
            assert_type(group.finish("done"), bool)
        ended = group.closure()
        assert ended is not None
        assert_type((ended.by, ended.reason, ended.succeeded), tuple[str, str, bool])
        group.leave("done")
    rdzv_etcd.leave_all(job)


def in_world(world: rdzv_etcd.World) -> None:
    assert_type((world.rank, world.size, world.epoch, world.round), tuple[int, int, int, int])
    assert_type(world.master, rdzv_etcd.Master)
    assert_type((world.master.address, world.master.port), tuple[str, int])
    assert_type(world.node_ids, tuple[str, ...])
    for member in world.members:
        assert_type(member, rdzv_etcd.WorldMember)
        assert_type((member.rank, member.node_id), tuple[int, str])
        assert_type((member.host, member.address), tuple[str, str])
        assert_type(member.data, Mapping[str, object])
    listener = world.take_listener()
    assert_type(listener, rdzv_etcd.Listener | None)
    if listener is not None:
        assert_type((listener.address, listener.port), tuple[str, int])
        assert_type(listener.socket, socket.socket)
        listener.close()
    assert_type(world.exchange(b"mine", timeout_s=60), list[bytes])
    world.barrier("loaded", timeout_s=60)
    in_store(world.store)
    assert_type((world.over, world.should_yield), tuple[bool, bool])
    assert_type(world.wait_over(0.0), bool)
    assert_type(why(world.change), str)


def observed(endpoints: str, job: str) -> None:
    with rdzv_etcd.observe(endpoints, job=job) as observer:
        assert_type(observer, rdzv_etcd.Observer)
        state = observer.state()
        assert_type(state, rdzv_etcd.JobState)
        assert state.stage is rdzv_etcd.Stage.WORKING
        for node in state.nodes:
            assert_type(node, rdzv_etcd.NodeState)
            assert node.role is rdzv_etcd.Role.MEMBER
        for event in observer.events():
            assert_type(event, "rdzv_etcd.JobEvent")
            print(told_of(event))
            break


def told_of(event: rdzv_etcd.JobEvent) -> str:
    """Every kind of event, with what it carries."""
    match event:
        case rdzv_etcd.Snapshot(state=state):
            return str(state.round)
        case rdzv_etcd.Joined(node=node):
            return node
        case rdzv_etcd.NodeMissing(node=node, how=how) | rdzv_etcd.NodeLost(node=node, how=how):
            return f"{node}: {how}"
        case rdzv_etcd.NodeLeft(node=node, reason=reason):
            return f"{node}: {reason}"
        case rdzv_etcd.WorldFormed(round=number, size=size):
            return f"{number}: {size}"
        case rdzv_etcd.WorldOver(round=number, change=change):
            return f"{number}: {change}"
        case rdzv_etcd.JobEnded(succeeded=succeeded, by=by, reason=reason):
            return f"{by}: {succeeded}: {reason}"
        case rdzv_etcd.Missed(count=count):
            return str(count)
    assert_never(event)


def watched(group: rdzv_etcd.Group, world: rdzv_etcd.World) -> None:
    """For supervisors."""
    group.drain("maintenance")
    rdzv_etcd.torch.run(group, in_world, backend="gloo")


def in_store(store: rdzv_etcd.RoundStore) -> None:
    store.set("one", b"1")
    store.multi_set({"two": b"2", "three": b"3"})
    assert_type(store.get("one", timeout_s=60, even_if_over=True), bytes)
    assert_type(store.multi_get(["two", "three"]), list[bytes])
    store.wait(["one"])
    assert_type(store.check(["one"]), bool)
    assert_type(store.add("number", 2), int)
    store.append("one", b"1")
    assert_type(store.compare_set("one", b"11", b"1"), bytes)
    assert_type(store.delete("one"), bool)
    assert_type(store.num_keys(), int)
    assert_type(store.list_keys(), list[str])


def why(change: rdzv_etcd.WorldChange | None) -> str:
    """Every kind of change, with what it carries."""
    match change:
        case None:
            return "it is not over"
        case rdzv_etcd.Lost(members=members, waiting=_) | rdzv_etcd.Left(members=members):
            return ", ".join(f"{node}: {how}" for node, how in members.items())
        case rdzv_etcd.Waiting(nodes=nodes, because=because):
            return ", ".join(f"{node}: {because.get(node, 'is new')}" for node in nodes)
        case rdzv_etcd.Finished(by=by, reason=reason) | rdzv_etcd.Failed(by=by, reason=reason):
            return f"{by}: {reason}"
        case rdzv_etcd.Expelled() | rdzv_etcd.MovedOn():
            return str(change)
    assert_never(change)


def told(error: RdzvEtcdError) -> object:
    """What the errors carry."""
    match error:
        case WorldOverError():
            return assert_type(error.change, "rdzv_etcd.WorldChange | None")
        case JobClosedError():
            return assert_type((error.succeeded, error.was_member), tuple[bool, bool])
        case BarrierTimeoutError():
            return error.missing
        case JoinTimeoutError():
            return error.arrived
        case StoreTimeoutError():
            return error.keys
        case EtcdUnavailableError():
            return error.endpoints
    return str(error)


def by_settings(endpoint: str, job: str) -> tuple[rdzv_etcd.Group, ...]:
    """The long way, for those who build their own settings."""
    listed = rdzv_etcd.parse_endpoints(endpoint).endpoints
    assert_type(listed, tuple[rdzv_etcd.Endpoint, ...])
    connection = rdzv_etcd.Connection(
        endpoints=listed,
        tls=rdzv_etcd.Tls() if endpoint.startswith("https") else None,
        credentials=rdzv_etcd.Credentials(user="root", password="secret"),
    )
    built = rdzv_etcd.Settings(
        job_id=job,
        connection=connection,
        job=rdzv_etcd.JobSettings(min_nodes=1, max_nodes=2),
        timing=rdzv_etcd.Timing(lease_ttl_s=5),
    )
    read = rdzv_etcd.settings_from_config(
        endpoint=endpoint,
        job_id=job,
        min_nodes=1,
        max_nodes=2,
        local_addr=None,
        config={"lease_ttl": "5"},
        environ={},
    )
    return (
        rdzv_etcd.Group(built),
        rdzv_etcd.Group(read, connect=lambda: rdzv_etcd.EtcdClient(connection)),
    )


def refused(group: rdzv_etcd.Group, world: rdzv_etcd.World) -> None:
    """Mistakes that a type checker has to find."""
    rdzv_etcd.connect("etcd:2379", job="job")  # type: ignore[call-arg] # how many nodes?
    rdzv_etcd.connect("etcd:2379", job="job", nodes=2, lease_ttl="5")  # type: ignore[arg-type]
    rdzv_etcd.connect("etcd:2379", job="job", nodes=2, lease_tll=5)  # type: ignore[call-arg]
    world.exchange("text")  # type: ignore[arg-type] # bytes
    world.barrier()  # type: ignore[call-arg] # its name
    world.store.set("key", "text")  # type: ignore[arg-type] # bytes
    world.rank = 1  # type: ignore[misc] # it never changes
    group.fail()  # type: ignore[call-arg] # why?
    group.fail("it is broken", force=True)
    group.join(timeout_s="60")  # type: ignore[arg-type] # seconds
    assert_type(group.join(because="its worker was killed by SIGSEGV"), rdzv_etcd.World)
    group.join(because=1)  # type: ignore[arg-type] # a text for people


if __name__ == "__main__":
    print(rdzv_etcd.__version__)
    main(*sys.argv[1:])
