"""``drain`` asks a node to leave in good order, and waits for it; ``status`` tells."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rdzv_etcd.cli import drain
from rdzv_etcd.cli.admin import operator
from rdzv_etcd.cli.drain import DrainOutcome, what_follows
from rdzv_etcd.errors import DrainedError
from rdzv_etcd.etcd.port import Etcd, Put, Txn
from rdzv_etcd.protocol.codec import (
    encode_accusation,
    encode_drain,
    encode_node,
    encode_slice,
)
from rdzv_etcd.protocol.job_state import job_state
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Accusation, Drain, NodeInfo
from rdzv_etcd.protocol.ranks import cut, slices_for
from rdzv_etcd.protocol.requests import say_goodbye
from rdzv_etcd.settings import JobSettings, Settings
from rdzv_etcd.testing import Applied, MemoryEtcd
from rdzv_etcd.world_change import Left
from tests.cli.test_hostile import EVIL, is_harmless
from tests.cli.tools import LIMIT_S, PREFIX, Run, lease, plant_node, plant_round, run_alone
from tests.library.nodes import (
    RemoteNode,
    groups,
    join_all,
    node_options,
    node_settings,
    wait_until,
)
from tests.protocol.scenes import Scene
from tests.support.servers import EtcdServer

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


@pytest.mark.parametrize("leads", [True, False])
def test_a_drained_node_leaves_and_the_others_are_told(
    etcd_server: EtcdServer, job_id: str, act: Run, leads: bool
) -> None:
    settings = node_settings(etcd_server, job_id, "1:2", lease_ttl=LONG_S)
    with groups(settings, 2) as nodes:
        worlds = join_all(nodes)
        rows = act("status", job_id, "--json").json["status"]["nodes"]
        (drained_id,) = (row["node"] for row in rows if row["leads"] == leads)
        (drained,) = (node for node in nodes if node.node_id == drained_id)
        (other,) = (world for world, node in zip(worlds, nodes, strict=True) if node != drained)

        def stop() -> None:
            wait_until("it has heard of it", lambda: drained.drain_reason)
            with pytest.raises(DrainedError):
                drained.join()

        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(stop)
            words = ("--reason", "its fan is loud", "--wait=60", "--yes", "--json")
            done = act("drain", job_id, drained_id, *words)
            stopped.result()
        assert done.code == 0, done
        assert done.json["drain"] == {
            "job": job_id,
            "node": drained_id,
            "by": operator(),
            "reason": "its fan is loud",
            "fate": "left",
        }
        assert other.wait_over(60)
        assert other.change == Left({drained_id: f"drained by {operator()}: its fan is loud"})


def test_a_request_stands_and_is_shown_until_the_node_leaves(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    with groups(node_settings(etcd_server, job_id, "2", lease_ttl=LONG_S), 2) as nodes:
        worlds = join_all(nodes)
        node_id = nodes[1].node_id
        done = act("drain", job_id, node_id, "--yes", "--reason=its fan is loud")
        assert done.code == 0, done
        assert f"{node_id} is being drained (drained by {operator()}: its fan" in done.out
        assert "1 more: the job needs 2" in done.out
        wait_until("all may stop", lambda: all(world.should_yield for world in worlds))
        again = act("drain", job_id, node_id, "--json", "--reason=another", "--wait=0.2")
        assert again.code == 1
        told = again.json["drain"]
        assert (told["reason"], told["fate"]) == ("its fan is loud", "open")
        assert "was already being drained" in act("drain", job_id, node_id).out
        assert not any(world.over for world in worlds)
        (drain,) = act("status", job_id, "--json").json["status"]["drains"]
        assert drain == {
            "node": node_id,
            "by": operator(),
            "reason": "its fan is loud",
            "epoch": worlds[0].epoch,
        }
        shown = act("status", job_id)
        assert shown.code == 0
        why = re.escape(f"drained by {operator()}: its fan is loud")
        assert re.search(rf"^    being drained: {node_id} \({why}\)$", shown.out, re.MULTILINE)
        assert re.search(rf" being drained: {why} *$", shown.out, re.MULTILINE)
        nodes[1].leave()
        assert act("status", job_id, "--json").json["status"]["drains"] == []


def test_one_that_waits_leaves_at_once(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "2", lease_ttl=LONG_S), 1) as (node,):
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(node.join)
            key = JobKeys(PREFIX, job_id).node(node.node_id)
            wait_until("arrived", lambda: etcd_server.keys(key))
            done = act("drain", job_id, node.node_id.split("~")[0], "--yes", "--wait=60")
            with pytest.raises(DrainedError, match="no reason given"):
                joining.result()
        assert done.code == 0, done
        assert "works in no world, and leaves at once" in done.out
        assert "has left: drained by" in done.out


def test_one_that_is_killed_first_has_not_left(etcd_server: EtcdServer, job_id: str) -> None:
    options = node_options(etcd_server, job_id, "1:2")
    settings = node_settings(etcd_server, job_id, "1:2")
    with (
        groups(settings, 1) as (node,),
        RemoteNode(options) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        joined = pool.submit(node.join)
        other.call("join")
        joined.result()
        words = ("drain", job_id, other.node_id, "--yes", "--wait=100", "--json")
        asking = pool.submit(run_alone, *words, "--endpoint", etcd_server.endpoint)
        key = JobKeys(PREFIX, job_id).drain(other.node_id)
        wait_until("it is asked", lambda: etcd_server.keys(key), LIMIT_S)
        other.process.kill()
        other.process.wait()
        done = asking.result()
    assert (done.code, done.json["drain"]["fate"]) == (1, "lost"), done


def test_a_request_that_etcd_loses_is_repeated_by_who_waits_for_the_node(
    etcd_server: EtcdServer, job_id: str
) -> None:
    keys = JobKeys(PREFIX, job_id)
    plant_node(etcd_server, job_id, "one~1~a")
    with ThreadPoolExecutor(1) as pool:
        words = ("drain", job_id, "one~1~a", "--yes", "--wait=100")
        asking = pool.submit(run_alone, *words, "--endpoint", etcd_server.endpoint)
        key = keys.drain("one~1~a")
        wait_until("it is asked", lambda: etcd_server.keys(key), LIMIT_S)
        etcd_server.gateway.delete_prefix(key)
        wait_until("it is asked again", lambda: etcd_server.keys(key), LIMIT_S)
        etcd_server.gateway.delete_prefix(keys.nodes.start)
        assert asking.result().code == 0


def test_who_has_died_is_not_shown_as_about_to_leave(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    plant_node(etcd_server, job_id, "one~1~a")
    value = encode_drain(Drain("me", "its fan"))
    for node_id in ("one~1~a", "dead~1~a"):
        key = JobKeys(PREFIX, job_id).drain(node_id)
        etcd_server.gateway.put(key, value, lease(etcd_server))
    assert "being drained: one (drained by me: its fan)" in act("status", job_id).out
    (told,) = act("status", job_id, "--json").json["status"]["drains"]
    assert told["node"] == "one~1~a"


def test_who_is_not_there_is_not_asked(etcd_server: EtcdServer, job_id: str, act: Run) -> None:
    keys = JobKeys(PREFIX, job_id)
    plant_node(etcd_server, job_id, "twin~1~a")
    plant_node(etcd_server, job_id, "twin~2~b")
    accusation = encode_accusation(Accusation("twin~1~a", "no power", is_certain=True))
    etcd_server.gateway.put(keys.node("dead~3~c"), accusation, lease(etcd_server))
    etcd_server.gateway.put(keys.node("stray~4~d"), b"x", lease(etcd_server))
    for name, said in [
        ("nobody", "no node 'nobody'"),
        ("twin", "names 2 nodes"),
        ("dead", "found to be dead"),
        ("stray", "is not a node"),
    ]:
        done = act("drain", job_id, name, "--yes")
        assert (done.code, said in done.err) == (1, True), done
    assert not etcd_server.keys(keys.drains.start)


def test_a_member_of_a_large_world_is_known_by_its_slice(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    ids = [f"node{number}~{number}~a" for number in range(200)]
    slices = slices_for(len(ids), 128, "edition")
    assert slices is not None
    settings = JobSettings(1, 200)
    _, job_lease = plant_round(etcd_server, job_id, (), settings=settings, slices=slices)
    keys = JobKeys(PREFIX, job_id)
    for index, ranks in enumerate(cut(ids, slices)):
        key = keys.slice(1, slices.edition, index)
        etcd_server.gateway.put(key, encode_slice(ranks), job_lease)
    for node_id, arrived_for in ((ids[7], 1), ("spare~1~a", 2)):
        plant_node(etcd_server, job_id, node_id, settings=settings, arrived_for=arrived_for)
    assert "at its next commit point" in act("drain", job_id, ids[7], "--yes").out
    assert "leaves at once" in act("drain", job_id, "spare", "--yes").out


# --- what is decided ------------------------------------------------------------------------------


def test_what_a_node_does_depends_on_where_it_is() -> None:
    def follows(scene: Scene, node: str) -> str:
        return what_follows(job_state("job", scene.control, scene.nodes), node)

    world = Scene(2, 4, members="a b")
    assert follows(Scene(2, 4, members="a b c"), "b").endswith("the others continue without it")
    assert follows(world, "b").endswith("1 more: the job needs 2")
    for scene in (world.back("b"), world.new("n"), Scene(2, 4).new("n")):
        node = "n" if "n" in scene.nodes.present else "b"
        assert "leaves at once" in follows(scene, node)


def test_requests_of_strangers_are_shown_as_text(
    etcd_server: EtcdServer, job_id: str, act: Run
) -> None:
    value = encode_drain(Drain("[red]who[/red]", EVIL))
    for number in range(50):
        plant_node(etcd_server, job_id, f"{number}~1~a")
        for node_id in (f"{number}~1~a", f"{number}{EVIL}"):  # the latter cannot be a node
            key = JobKeys(PREFIX, job_id).drain(node_id)
            etcd_server.gateway.put(key, value, lease(etcd_server))
    done = act("status", job_id)
    assert is_harmless(done.out), done.out
    assert "and 46 more" in done.out
    assert len(act("status", job_id, "--json").json["status"]["drains"]) == 50


@pytest.mark.parametrize("came_back", [False, True])
def test_a_farewell_that_the_watch_tells_late_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, job_id: str, came_back: bool
) -> None:
    """A read shows that the node has gone, before the watch has brought why."""
    settings, keys = Settings(job_id, JobSettings(1, 2)), JobKeys(PREFIX, job_id)
    info = NodeInfo("one~1~a", "10.0.0.1", 4711, 1, settings.job)

    async def scenario() -> tuple[str, Drain, DrainOutcome, str]:
        async with MemoryEtcd() as server:
            node, asking = server.connect(), server.connect()
            session = (await node.grant(60)).lease_id
            await node.txn(Txn((), (Put(keys.node(info.node_id), encode_node(info), session),)))

            @asynccontextmanager
            async def connected(_settings: Settings) -> AsyncIterator[Etcd]:
                yield asking

            async def leave() -> None:
                nonlocal session
                if came_back:  # from a lease that had run out, and for longer than is waited
                    await node.revoke(session)
                    await asyncio.sleep(1.0)
                    session = (await node.grant(60)).lease_id
                    put = Put(keys.node(info.node_id), encode_node(info), session)
                    await node.txn(Txn((), (put,)))
                    await asyncio.sleep(drain._BACK_S + 1.0)
                    await node.txn(Txn((), (put,)))  # of which the watch tells when it has left
                    await asyncio.sleep(0.2)
                await node.txn(say_goodbye(keys, replace(info, leaving="drained"), session))
                await node.revoke(session)

            leaving: list[asyncio.Task[None]] = []

            def asked(applied: Applied) -> None:
                if not leaving and any(
                    event.kv.key == keys.drain(info.node_id)
                    for revision in applied.changes
                    for event in revision.events
                ):
                    asking.link.lag_watches(0.5)
                    leaving.append(asyncio.ensure_future(leave()))

            server.observers.append(asked)
            monkeypatch.setattr(drain, "connected", connected)
            return await drain._drain(settings, "one", "upgrade", LIMIT_S, yes=True, as_json=True)

    assert asyncio.run(scenario())[2:] == (DrainOutcome.LEFT, "drained")
