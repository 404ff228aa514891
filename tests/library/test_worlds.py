"""What the members of a world do together: the library's own doors, as its users find them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import Failed, Finished, Group, Left, Lost, World, WorldMember
from rdzv_etcd.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    JobClosedError,
    MisuseError,
    RequestTooLargeError,
    SettingsError,
    StateCorruptError,
    StoreTimeoutError,
    WorldClosedError,
    WorldOverError,
)
from rdzv_etcd.world import collectives
from tests.library.nodes import (
    LIMIT_S,
    RemoteNode,
    at_once,
    join_all,
    node_options,
    notified_of_nothing,
    wait_until,
)
from tests.support.leaks import LeakCheck, job_root
from tests.support.servers import EtcdServer


class Door:
    """Nodes of one job, made as a user makes them; they leave in the end."""

    def __init__(self, stack: ExitStack, server: EtcdServer, job_id: str) -> None:
        self._stack = stack
        self._server = server
        self._job_id = job_id

    def connect(self, nodes: Any, **given: Any) -> Group:
        quick: dict[str, Any] = {"lease_ttl": 3, "settle": 0.1, "closed_ttl": 5, "ended_ttl": 5}
        return self._stack.enter_context(
            rdzv_etcd.connect(
                self._server.endpoint,
                job=self._job_id,
                nodes=nodes,
                local_addr="127.0.0.1",
                **{**quick, **given},
            )
        )

    def worlds(self, count: int, nodes: Any = 0, **given: Any) -> tuple[list[Group], list[World]]:
        """Let that many join; in the order of their ranks."""
        groups = [self.connect(nodes or count, **given) for _ in range(count)]
        pairs = sorted(zip(join_all(groups), groups, strict=True), key=lambda pair: pair[0].rank)
        return [group for _, group in pairs], [world for world, _ in pairs]

    def wait_for_bytes(self, members: int) -> None:
        """Until that many have given something in the first exchange."""
        given = re.compile(rb"/exchange[^/]*/given/1/\d+$")

        def look() -> bool:
            keys = self._server.gateway.keys(job_root(self._job_id))
            return len([key for key in keys if given.search(key)]) == members

        wait_until(f"{members} have given", look)


@pytest.fixture
def door(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack, etcd_server, job_id)


# --- connect --------------------------------------------------------------------------------------


def test_a_loop_over_worlds_ends_when_the_job_is_finished(door: Door) -> None:
    """A member leaves, the others go on in a world of their own, and finish: a loop to copy."""
    groups = [door.connect((2, 3), last_call_timeout=LIMIT_S) for _ in range(3)]

    def work(group: Group) -> list[tuple[int, object]]:
        told: list[tuple[int, object]] = []
        for world in group.worlds():
            world.barrier("all work", LIMIT_S)
            if world.size == 3 and world.rank == 2:
                group.leave("has to go")
                return told
            if world.size == 2:
                group.finish("all done")
            assert world.wait_over(LIMIT_S)
            told.append((world.size, world.change))
        return told

    told = at_once([partial(work, group) for group in groups])
    (gone,) = [group for group in groups if group.has_left]
    stayed = [group for group in groups if group is not gone]
    assert [changes for changes in told if not changes] == [[]]
    for changes in filter(None, told):
        assert changes[0] == (3, Left({gone.node_id: "has to go"}))
        assert changes[1][0] == 2
        assert changes[1][1] in [Finished(group.node_id, "all done") for group in stayed]


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


@pytest.mark.parametrize("nodes", [2, (2, 2)])
def test_a_number_of_nodes_or_the_fewest_and_the_most(door: Door, nodes: Any) -> None:
    _, worlds = door.worlds(2, nodes)
    assert [(world.rank, world.size) for world in worlds] == [(0, 2), (1, 2)]


class Two:
    """A whole number of another library, as NumPy has them."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("nodes", [Two(), (Two(), 2), [2, 2]])
def test_a_number_of_any_type(door: Door, nodes: Any) -> None:
    _, worlds = door.worlds(2, nodes, epoch_floor=Two())
    assert [world.size for world in worlds] == [2, 2]


@pytest.mark.parametrize(
    "nodes",
    ["2", (1, 2, 3), None, (1, "2"), 2.0, True, (True, 2), (), {1, 2}, (1, 2, 10**5000)],
    ids=lambda nodes: type(nodes).__name__,
)
def test_what_is_no_number_of_nodes(nodes: Any) -> None:
    with pytest.raises(SettingsError, match=r"nodes is .* it must be a number, or a pair"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=nodes)
    with pytest.raises(SettingsError, match=rf"\({type(nodes).__name__}\); it must be a number"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=nodes)


@pytest.mark.parametrize(
    "endpoints",
    [b"localhost:2379", None, [1], [], "", " ", [""], 5, 10**5000, [10**5000]],
    ids=lambda endpoints: type(endpoints).__name__,
)
def test_what_is_no_endpoint(endpoints: Any) -> None:
    """Nothing given is a mistake in a program; torchrun's users mean their own machine by it."""
    with pytest.raises(SettingsError, match=r"endpoints is .* it must be the address of an etcd"):
        rdzv_etcd.connect(endpoints, job="a", nodes=1)


@pytest.mark.parametrize("job", [None, 7, b"a"])
def test_what_is_no_job(job: Any) -> None:
    with pytest.raises(SettingsError, match=r"the job id .* must be text"):
        rdzv_etcd.connect("localhost:2379", job=job, nodes=1)


@pytest.mark.parametrize("local_addr", [7, b"127.0.0.1", ["127.0.0.1"]])
def test_what_is_no_address(local_addr: Any) -> None:
    with pytest.raises(SettingsError, match="neither a host name nor an address"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, local_addr=local_addr)


@pytest.mark.parametrize("epoch_floor", ["5", 1.5, None, True, -1])
def test_what_is_no_epoch(epoch_floor: Any) -> None:
    with pytest.raises(SettingsError, match="epoch_floor is"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, epoch_floor=epoch_floor)


@pytest.mark.parametrize("name", ["is_host", "store_type"])
def test_an_option_that_only_torchrun_takes(name: str) -> None:
    given: dict[str, Any] = {name: True}
    with pytest.raises(SettingsError, match=f"{name} is an option for torchrun only"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, **given)


def test_data_are_those_of_the_moment(door: Door) -> None:
    data: dict[str, Any] = {"gpus": [8]}
    group = door.connect(1, data=data)
    data["gpus"].append(object())
    assert group.join().members[0].data == {"gpus": [8]}


def test_data_may_be_any_mapping(door: Door) -> None:
    (member,) = door.connect(1, data=MappingProxyType({"gpus": 8})).join().members
    assert member.data == {"gpus": 8}


@pytest.mark.parametrize("levels", [30, 10_000])
def test_the_same_list_in_data_again_and_again_is_not_followed(levels: int) -> None:
    """Written out it would be a billion values."""
    shared: list[Any] = []
    for _ in range(levels):
        shared = [shared, shared]
    with pytest.raises(SettingsError, match=r"data has more than 4096 values in it; .* exchanged"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, data={"a": shared})


def test_data_that_is_in_itself_is_refused() -> None:
    whole: dict[str, Any] = {}
    whole["a"] = whole
    with pytest.raises(SettingsError, match="in each other more than 32 deep"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, data=whole)


def test_data_may_be_only_so_deep(door: Door) -> None:
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    assert door.connect(1, data={"a": deep}).join().members[0].data == {"a": deep}
    for deeper in ([deep], {"b": deep}):
        with pytest.raises(SettingsError, match="in each other more than 32 deep"):
            door.connect(1, data={"a": deeper})


def test_several_endpoints(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> None:
    with rdzv_etcd.connect(
        [etcd_server.endpoint, etcd_server.endpoint.replace("127.0.0.1", "localhost")],
        job=job_id,
        nodes=1,
    ) as group:
        assert group.job == job_id
        assert group.join().size == 1


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(SettingsError, match="lease_ttl"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, lease_tll=3)  # type: ignore[call-arg]


def test_the_environment_gives_no_epoch(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher inside a torchrun worker has that variable: it is another job's."""
    monkeypatch.setenv("RDZV_ETCD_EPOCH", str(2**52))
    _, (world,) = door.worlds(1)
    assert world.epoch < 2**52


def test_an_epoch_that_the_job_has_reached_before(door: Door) -> None:
    _, (world,) = door.worlds(1, epoch_floor=2**52)
    assert world.epoch > 2**52


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


@pytest.mark.parametrize(
    "data",
    [
        {"a": (1, 2)},
        {1: "a"},
        {"a": float("nan")},
        {"a": object()},
        ["a"],
        {"a": "x" * 5000},
        {"a": b"bytes"},
    ],
    ids=["tuple", "key", "nan", "object", "list", "long", "bytes"],
)
def test_data_that_others_would_read_otherwise(data: Any) -> None:
    with pytest.raises(SettingsError, match="data"):
        rdzv_etcd.connect("localhost:2379", job="a", nodes=1, data=data)


def test_members_are_waited_for_no_longer_than_their_world(door: Door) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    groups[1].leave()
    with pytest.raises(WorldOverError, match="the members: round 1 is over") as caught:
        assert worlds[0].members
    assert isinstance(caught.value.change, Left | Lost)


def test_a_strangers_value_among_the_members_is_named(
    door: Door, etcd_server: EtcdServer, job_id: str
) -> None:
    groups, worlds = door.worlds(2, lease_ttl=600)
    key = job_root(job_id) + b"nodes/" + groups[1].node_id.encode()
    lease = etcd_server.gateway.keys(key)[key].lease_id
    etcd_server.gateway.put(key, b'{"v":1,"data":[]}', lease)
    with pytest.raises((StateCorruptError, WorldOverError), match=groups[1].node_id):
        assert worlds[0].members


# --- exchange -------------------------------------------------------------------------------------


def test_everybody_has_everybodys_bytes_by_rank(door: Door) -> None:
    _, worlds = door.worlds(3)
    for turn in range(3):
        mine = [b"", b"\x00\xff", b"x" * 100_000]
        give = [partial(world.exchange, mine[(world.rank + turn) % 3]) for world in worlds]
        answers = at_once(give)
        assert answers == [[mine[(rank + turn) % 3] for rank in range(3)]] * 3


def test_an_exchange_across_processes_and_rounds(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    options = node_options(etcd_server, job_id, "2")
    with RemoteNode(options) as one, RemoteNode(options) as two:
        for _ in range(2):
            joined = at_once([partial(node.call, "join") for node in (one, two)])
            texts = [f"of {world['rank']}" for world in joined]
            gave = [partial(n.call, "exchange", t) for n, t in zip((one, two), texts, strict=True)]
            assert at_once(gave) == [["of 0", "of 1"]] * 2
        at_once([one.finish, two.finish])


def test_an_exchange_that_runs_out_of_time_names_who_is_missing_and_may_be_tried_again(
    door: Door,
) -> None:
    groups, worlds = door.worlds(3)
    with pytest.raises(BarrierTimeoutError, match="2 of 3 members are missing") as caught:
        worlds[0].exchange(b"early", 0.3)
    assert caught.value.missing == (groups[1].node_id, groups[2].node_id)
    answers = at_once([partial(world.exchange, b"%d" % world.rank, LIMIT_S) for world in worlds])
    assert answers == [[b"early", b"1", b"2"]] * 3  # what was given first may have been read


def test_one_exchange_at_a_time(door: Door) -> None:
    _, worlds = door.worlds(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worlds[0].exchange, b"0", LIMIT_S)
        door.wait_for_bytes(1)
        with pytest.raises(MisuseError, match="in an exchange already"):
            worlds[0].exchange(b"also", LIMIT_S)
        assert worlds[1].exchange(b"1", LIMIT_S) == [b"0", b"1"]
        assert waiting.result(LIMIT_S) == [b"0", b"1"]


def test_what_all_gave_before_one_left_is_there_for_all(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    monkeypatch.setattr(collectives, "puts_after", notified_of_nothing)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worlds[0].exchange, b"0", LIMIT_S)
        door.wait_for_bytes(1)
        assert worlds[1].exchange(b"1", LIMIT_S) == [b"0", b"1"]
        groups[1].leave("has all it needs")
        assert waiting.result(LIMIT_S) == [b"0", b"1"]


def test_no_more_than_two_exchanges_are_kept(
    door: Door, etcd_server: EtcdServer, job_id: str
) -> None:
    def kept() -> set[bytes]:
        place = job_root(job_id) + b"barrier/"
        return {
            key.rpartition(b"/given/")[2] for key in etcd_server.keys(place) if b"/given/" in key
        }

    _, worlds = door.worlds(2)
    for turn in range(1, 6):
        with pytest.raises(BarrierTimeoutError):  # whoever tries again still finds all
            worlds[0].exchange(b"%d" % turn, 0.2)
        assert worlds[1].exchange(b"-", LIMIT_S) == [b"%d" % turn, b"-"]
        assert worlds[0].exchange(b"other", LIMIT_S) == [b"%d" % turn, b"-"]
        turns = [turn - 1, turn] if turn > 1 else [turn]
        assert kept() == {b"%d/%06d" % (each, rank) for each in turns for rank in (0, 1)}


@pytest.mark.parametrize("given", ["text", 5, None, [b"x"]])
def test_what_is_no_bytes_does_not_count_as_given(door: Door, given: Any) -> None:
    _, (world,) = door.worlds(1)
    with pytest.raises(MisuseError, match=rf"\({type(given).__name__}\); it must be bytes"):
        world.exchange(given)
    assert world.exchange(bytearray(b"bytes")) == [b"bytes"]
    assert world.exchange(memoryview(b"more")) == [b"more"]


def test_an_exchange_ends_with_its_world(door: Door) -> None:
    groups, worlds = door.worlds(2, (1, 2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worlds[0].exchange, b"mine")
        groups[1].leave("has to go")
        with pytest.raises(WorldOverError, match="has to go") as caught:
            waiting.result(LIMIT_S)
    assert caught.value.change == Left({groups[1].node_id: "has to go"})


def test_an_exchange_hears_that_the_job_has_failed(door: Door) -> None:
    groups, worlds = door.worlds(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worlds[0].exchange, b"mine")
        groups[1].fail("no more data")
        with pytest.raises(JobClosedError, match="no more data"):
            waiting.result(LIMIT_S)
    assert worlds[0].change == Failed(groups[1].node_id, "no more data")


def test_what_is_too_large_for_etcd_is_refused(door: Door) -> None:
    _, (world,) = door.worlds(1)
    world.exchange(b"x")
    with pytest.raises(
        RequestTooLargeError,
        match=r"^what this member gives in exchange 2 takes 2000000 bytes, more than etcd .* cut",
    ):
        world.exchange(b"x" * 2_000_000)
    assert world.exchange(b"less") == [b"less"]


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


def test_a_key_that_nobody_sets(door: Door) -> None:
    _, (world,) = door.worlds(1)
    with pytest.raises(StoreTimeoutError) as caught:
        world.store.multi_get(["there", "not"], 0.2)
    assert set(caught.value.keys) == {"there", "not"}


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


@pytest.mark.parametrize("name", ["rank", "size", "epoch", "round", "master"])
def test_a_world_never_changes(door: Door, name: str) -> None:
    _, (world,) = door.worlds(1)
    before = getattr(world, name)
    for each in (world, rdzv_etcd.aio.World(world)):
        with pytest.raises(AttributeError):
            setattr(each, name, 7)
        assert getattr(each, name) == before


def test_a_member_is_a_value(door: Door) -> None:
    _, (world,) = door.worlds(1, data={"gpus": 8})
    (member,) = world.members
    with pytest.raises(TypeError):
        member.data["gpus"] = 9  # type: ignore[index]
    assert member.data == {"gpus": 8}
    assert {member: "is a key"}[member]
    for again in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):
        assert again == member
        assert hash(again) == hash(member)


def test_how_it_looks(door: Door) -> None:
    _, (world,) = door.worlds(1)
    assert repr(world) == (
        f"<World rank=0 size=1 epoch={world.epoch} round=1 master=127.0.0.1:{world.master.port}>"
    )
