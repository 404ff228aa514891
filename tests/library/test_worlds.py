"""What the members of a world do together: the library's own doors, as its users find them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import Group, Left, Lost, World, WorldMember
from rdzv_etcd.errors import (
    BarrierBrokenError,
    JobClosedError,
    SettingsError,
    StateCorruptError,
    WorldClosedError,
    WorldOverError,
)
from tests.library.nodes import LIMIT_S, Job, at_once, join_all, joined


class Door:
    """Nodes of one job, made as a user makes them; they leave in the end."""

    def __init__(self, stack: ExitStack, job: Job) -> None:
        self._stack = stack
        self._job = job

    def connect(self, nodes: Any, **given: Any) -> Group:
        quick: dict[str, Any] = {"lease_ttl": 3, "settle": 0.1, "closed_ttl": 5, "ended_ttl": 5}
        where = {"job": self._job.id, "nodes": nodes, "local_addr": "127.0.0.1"}
        return self._stack.enter_context(
            rdzv_etcd.connect(self._job.server.endpoint, **where, **{**quick, **given})
        )

    def worlds(self, count: int, nodes: Any = 0, **given: Any) -> tuple[list[Group], list[World]]:
        """Let that many join; in the order of their ranks."""
        return joined([self.connect(nodes or count, **given) for _ in range(count)])


@pytest.fixture
def door(job: Job) -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack, job)


# --- connect --------------------------------------------------------------------------------------


def test_a_loop_whose_body_is_interrupted_by_changes_goes_on(door: Door) -> None:
    """As docs/library.md shows it: a member leaves while others wait for it, and one finishes the
    job while the other waits for it."""
    groups = [door.connect((2, 3), last_call_timeout=LIMIT_S) for _ in range(3)]

    def work(group: Group) -> list[type[Exception]]:
        raised: list[type[Exception]] = []
        for world in group.worlds():
            try:
                world.exchange(b"mine", LIMIT_S)
                if world.size == 3 and world.rank == 2:
                    group.leave("has to go")
                    return raised
                if world.size == 2 and world.rank == 0:
                    group.finish("all done")
                world.barrier("never all", LIMIT_S)
            except WorldOverError as error:
                raised.append(type(error))
        return raised

    told = at_once([partial(work, group) for group in groups])
    assert sorted(told, key=len) == [[], *2 * [[BarrierBrokenError, WorldClosedError]]]


def test_a_loop_over_worlds_raises_that_the_job_has_failed(door: Door) -> None:
    groups, worlds = door.worlds(2)
    loop = groups[1].worlds()
    groups[0].fail("no more data")
    assert worlds[1].wait_over(LIMIT_S)
    with pytest.raises(JobClosedError, match="no more data"):
        next(loop)


class Two:
    """A whole number of another library, as NumPy has them."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("nodes", [2, (2, 2), [2, 2], Two(), (Two(), 2)])
def test_a_number_of_nodes_or_the_fewest_and_the_most(door: Door, nodes: Any) -> None:
    _, worlds = door.worlds(2, nodes, epoch_floor=Two())
    assert [(world.rank, world.size) for world in worlds] == [(0, 2), (1, 2)]


REFUSED: list[tuple[str, Any, str]] = [
    *(
        ("nodes", nodes, rf"nodes is .*\({type(nodes).__name__}\); it must be a number, or a pair")
        for nodes in ("2", (1, 2, 3), None, (1, "2"), 2.0, True, (True, 2), (), {1, 2})
    ),
    ("nodes", (1, 2, 10**5000), r"nodes is .*\(tuple\); it must be a number, or a pair"),
    # Nothing given is a mistake in a program; torchrun's users mean their own machine by it.
    *(
        ("endpoints", endpoints, r"endpoints is .* it must be the address of an etcd")
        for endpoints in (b"localhost:2379", None, [1], [], "", " ", [""], 5, 10**5000, [10**5000])
    ),
    *(("job", job, r"the job id .* must be text") for job in (None, 7, b"a")),
    *(
        ("local_addr", address, "neither a host name nor an address")
        for address in (7, b"127.0.0.1", ["127.0.0.1"])
    ),
    *(("epoch_floor", epoch, "epoch_floor is") for epoch in ("5", 1.5, None, True, -1)),
    ("is_host", True, "is_host is an option for torchrun only"),
    ("store_type", True, "store_type is an option for torchrun only"),
    ("lease_tll", 3, "lease_ttl"),
    *(
        ("data", data, "data")  # which others would read otherwise
        for data in (
            *({"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": object()}, ["a"]),
            *({"a": "x" * 5000}, {"a": b"bytes"}),
        )
    ),
]


@pytest.mark.parametrize(("name", "value", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_connect_refuses(name: str, value: Any, why: str) -> None:
    given: dict[str, Any] = {"endpoints": "localhost:2379", "job": "a", "nodes": 1, name: value}
    with pytest.raises(SettingsError, match=why):
        rdzv_etcd.connect(**given)


def test_data_may_be_any_mapping_and_are_those_of_the_moment(door: Door) -> None:
    data: dict[str, Any] = {"gpus": [8]}
    group = door.connect(1, data=MappingProxyType(data))
    data["gpus"].append(object())
    (member,) = group.join().members
    assert member.data == {"gpus": [8]}


@pytest.mark.parametrize("levels", [30, 10_000])
def test_the_same_list_in_data_again_and_again_is_not_followed(levels: int) -> None:
    """Written out it would be a billion values."""
    shared: list[Any] = []
    for _ in range(levels):
        shared = [shared, shared]
    with pytest.raises(SettingsError, match=r"data has (more than 4096 bytes|.* deep)"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, data={"a": shared})


def test_data_that_is_in_itself_is_refused() -> None:
    whole: dict[str, Any] = {}
    whole["a"] = whole
    with pytest.raises(SettingsError, match="cannot be written as JSON: Circular reference"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, data=whole)


def test_data_may_be_only_so_deep(door: Door) -> None:
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    assert door.connect(1, data={"a": deep}).join().members[0].data == {"a": deep}
    for deeper in ([deep], {"b": deep}):
        with pytest.raises(SettingsError, match="in each other more than 32 deep"):
            door.connect(1, data={"a": deeper})


def test_several_endpoints(job: Job) -> None:
    with rdzv_etcd.connect(
        [job.server.endpoint, job.server.endpoint.replace("127.0.0.1", "localhost")],
        job=job.id,
        nodes=1,
    ) as group:
        assert group.job == job.id
        assert group.join().size == 1


def test_the_environment_gives_no_epoch(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher inside a torchrun worker has that variable: it is another job's."""
    monkeypatch.setenv("RDZV_ETCD_EPOCH", str(2**52))
    _, (world,) = door.worlds(1)
    assert world.epoch < 2**52


# --- members --------------------------------------------------------------------------------------


def test_members_have_the_data_they_gave(door: Door) -> None:
    given: list[dict[str, object]] = [
        {"addr": "10.0.0.7:9000", "gpus": 8, "zone": None, "tags": ["a", {"b": 0.5}]},
        {},
        {"größe": "viel", "quote": '"'},
    ]
    groups = [door.connect(3, data=data) for data in given]
    worlds = join_all(groups)
    first = sorted(worlds, key=lambda world: world.rank)[0]
    by_id = dict(zip((group.node_id for group in groups), given, strict=True))
    for world in worlds:
        assert world.members == first.members
        assert [member.rank for member in world.members] == [0, 1, 2]
        assert tuple(member.node_id for member in world.members) == world.node_ids
        assert {member.node_id: member.data for member in world.members} == by_id
    me = first.members[0]
    assert isinstance(me, WorldMember)
    assert (me.address, me.host) == ("127.0.0.1", me.node_id.split("~")[0])


def test_members_of_a_large_world(door: Door) -> None:
    groups = [door.connect(5, data={"number": n}, slice_nodes=2) for n in range(5)]
    worlds = join_all(groups)
    assert {world.node_ids for world in worlds} == {worlds[0].node_ids}
    numbers = {member.node_id: member.data["number"] for member in worlds[3].members}
    assert numbers == {group.node_id: n for n, group in enumerate(groups)}


def test_members_are_waited_for_no_longer_than_their_world(door: Door) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    groups[1].leave()
    with pytest.raises(WorldOverError, match="the members: round 1 is over") as caught:
        assert worlds[0].members
    assert isinstance(caught.value.change, Left | Lost)


def test_a_strangers_value_among_the_members_is_named(door: Door, job: Job) -> None:
    groups, worlds = door.worlds(2, lease_ttl=600)
    key = job.root + b"nodes/" + groups[1].node_id.encode()
    lease = job.server.gateway.keys(key)[key].lease_id
    job.server.gateway.put(key, b'{"v":1,"data":[]}', lease)
    with pytest.raises((StateCorruptError, WorldOverError), match=groups[1].node_id):
        assert worlds[0].members


# --- store ----------------------------------------------------------------------------------------


def test_the_store_is_the_worlds_own(door: Door) -> None:
    groups, worlds = door.worlds(2)
    worlds[0].store.set("key", b"value")
    worlds[0].store.multi_set({"a": b"1", "b": b"2"})
    assert worlds[1].store.get("key") == b"value"
    assert worlds[1].store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert [world.store.add("count", 2) for world in worlds] == [2, 4]
    assert worlds[0].store.compare_set("key", b"value", b"other") == b"other"
    worlds[1].store.append("key", b"!")
    worlds[1].store.wait(["key", "a"])
    assert worlds[0].store.get("key") == b"other!"
    assert worlds[0].store.list_keys() == ["a", "b", "count", "key"]
    assert worlds[0].store.num_keys() == 4
    assert worlds[0].store.delete("key")
    assert not worlds[0].store.check(["key"])
    assert worlds[0].exchange is not None
    again = join_all(groups)
    assert again[0].store.num_keys() == 0


def test_nobody_waits_in_the_store_for_a_member_that_is_gone(door: Door) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    store = worlds[0].store
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(store.get, "its endpoint")
        patient = pool.submit(store.get, "late", LIMIT_S, even_if_over=True)
        groups[1].leave("has to go")
        with pytest.raises(WorldOverError, match="'its endpoint': round 1 is over"):
            waiting.result(LIMIT_S)
        store.set("late", b"here")
        assert patient.result(LIMIT_S) == b"here"
    assert store.get("late") == b"here"  # what is there is there


# --- its end --------------------------------------------------------------------------------------


def test_why_a_world_was_over_is_remembered(door: Door) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    groups[1].leave("has to go")
    assert worlds[0].wait_over(LIMIT_S)
    later = groups[0].join()
    assert worlds[0].change == Left({groups[1].node_id: "has to go"})
    assert worlds[0].take_listener() is None
    listener = later.take_listener()
    assert listener is not None
    listener.close()


def test_a_world_and_its_members_are_values(door: Door) -> None:
    _, (world,) = door.worlds(1, data={"gpus": 8})
    for name in ("rank", "size", "epoch", "round", "master"):
        before = getattr(world, name)
        with pytest.raises(AttributeError):
            setattr(world, name, 7)
        assert getattr(world, name) == before
    (member,) = world.members
    with pytest.raises(TypeError):
        member.data["gpus"] = 9  # type: ignore[index]
    assert member.data == {"gpus": 8}
    for again in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):
        assert {member: "is a key"}[again]
    assert repr(world) == (
        f"<World rank=0 size=1 epoch={world.epoch} round=1 master=127.0.0.1:{world.master.port}>"
    )
