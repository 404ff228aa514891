"""An embedded cluster of three with real processes; its hosts are three loopback addresses."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.cluster_start import (
    SeatKeeper,
    cluster_endpoints,
    cluster_state,
    start_seat,
)
from rdzv_etcd.embedded.launch import Wait, launch
from rdzv_etcd.embedded.port import own_addresses
from rdzv_etcd.embedded.seat import ClusterOrder, Place
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.world.group import Group
from tests.cli.tools import run_here
from tests.embedded.agents import (
    ALL,
    GRACE_S,
    LIMIT_S,
    OTHER_SECRET,
    SECRET,
    Agent,
    Cluster,
    environment,
    kill,
    settings,
    wait_for_end,
    with_secret,
)
from tests.embedded.conftest import Ensure, Start
from tests.library.nodes import join_all, node_settings, wait_until
from tests.support import netns
from tests.support.gateway import GatewayError
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary


@pytest.mark.every_etcd
def test_each_host_is_lost_in_turn_and_comes_back_while_nodes_work(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    founded = cluster.cluster()
    job = cluster.job()
    with Group(job) as first, Group(job) as second:
        epochs = [_reform([first, second])]
        for seat in sorted(ALL):
            cluster.lose(seat)
            epochs.append(_reform([first, second]))
            cluster.start(seat)
            cluster.wait_for(ALL)
            epochs.append(_reform([first, second]))
        assert epochs == sorted(set(epochs))
    assert cluster.cluster() == founded
    (members,) = {
        len(cluster.gateway(seat).call("/v3/cluster/member/list", {})["members"]) for seat in ALL
    }
    assert members == 3


def _reform(nodes: list[Group]) -> int:
    """Let the nodes form their next world; return its epoch."""
    worlds = join_all(nodes)
    assert {world.size for world in worlds} == {len(nodes)}
    return worlds[0].epoch


@pytest.mark.parametrize("cluster", [None, SECRET], indirect=True)
def test_two_of_three_serve_and_the_third_joins_when_it_comes(cluster: Cluster) -> None:
    cluster.start(0)
    assert cluster.state().members == set()
    cluster.start(2)
    cluster.wait_for({0, 2})
    cluster.gateway(0).put(b"k", b"v")
    cluster.start(1)
    cluster.wait_for(ALL)
    cluster.lose(0)
    wait_until("the others serve", lambda: _reads(cluster, 1))


def _reads(cluster: Cluster, seat: int) -> bool:
    try:
        return cluster.gateway(seat).keys()[b"k"].value == b"v"
    except (OSError, GatewayError):  # there is an election
        return False


def test_a_member_that_is_killed_is_replaced_by_an_empty_one(
    cluster: Cluster, scratch: Path
) -> None:
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    (etcd,) = cluster.supervisors[1].children()
    folder = Path(etcd.cwd())
    etcd.kill()
    wait_for_end(etcd)
    wait_until("another one runs", lambda: cluster.supervisors[1].children() not in ([], [etcd]))
    cluster.wait_for(ALL)
    assert not folder.exists()
    assert len(list(scratch.iterdir())) == 3


def test_two_hosts_lost_at_once_begin_a_new_cluster_that_the_third_joins(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    founded = cluster.cluster()
    job = cluster.job()
    with Group(job) as first, Group(job) as second:
        before = _reform([first, second])
        cluster.lose(1)
        cluster.lose(2)
        cluster.start(1, 2)
        cluster.wait_for(ALL)
        assert cluster.cluster() != founded
        assert _reform([first, second]) > before


def test_all_end_with_their_data_when_the_last_node_has_left(
    cluster: Cluster, scratch: Path
) -> None:
    cluster.start(0, 1, 2, embed_grace=GRACE_S)
    cluster.wait_for(ALL)
    lease_id = cluster.grant(0)
    etcds = [etcd for it in cluster.supervisors.values() for etcd in it.children()]
    with pytest.raises(psutil.TimeoutExpired):  # only a lower bound is waited for
        cluster.supervisors[1].wait(2)
    cluster.gateway(2).revoke(lease_id)
    for process in (*cluster.supervisors.values(), *etcds):
        wait_for_end(process)
    assert list(scratch.iterdir()) == []


def test_a_signal_takes_a_member_away_only_if_the_others_can_spare_it(cluster: Cluster) -> None:
    cluster.start(0, 1, 2, embed_grace=GRACE_S)
    cluster.wait_for(ALL)
    lease_id = cluster.grant(0)
    cluster.supervisors[0].terminate()
    wait_for_end(cluster.supervisors[0])
    cluster.wait_for({1, 2})
    cluster.supervisors[1].terminate()
    with pytest.raises(psutil.TimeoutExpired):
        cluster.supervisors[1].wait(2)
    cluster.gateway(2).revoke(lease_id)  # it serves
    for process in cluster.supervisors.values():
        wait_for_end(process)


def test_of_two_members_that_are_asked_to_end_at_once_at_most_one_does(cluster: Cluster) -> None:
    cluster.start(0, 1, 2, embed_grace=GRACE_S)
    cluster.wait_for(ALL)
    lease_id = cluster.grant(2)
    asked = [cluster.supervisors[0], cluster.supervisors[1]]
    for process in asked:
        process.terminate()
    gone, _ = psutil.wait_procs(asked, timeout=3)
    assert len(gone) <= 1
    cluster.gateway(2).revoke(lease_id)  # it serves
    for process in cluster.supervisors.values():
        wait_for_end(process)


def test_hosts_that_were_stopped_for_longer_than_the_grace_continue(cluster: Cluster) -> None:
    """First the supervisors alone, then with their etcds, as virtual machines are."""
    cluster.start(0, 1, 2, embed_grace=GRACE_S)
    cluster.wait_for(ALL)
    lives = cluster.lives()
    cluster.grant(0)
    supervisors = list(cluster.supervisors.values())
    etcds = [etcd for supervisor in supervisors for etcd in supervisor.children()]
    for stopped in (supervisors, [*supervisors, *etcds]):
        for process in stopped:
            process.suspend()
        with pytest.raises(psutil.TimeoutExpired):  # only a lower bound is waited for
            supervisors[0].wait(GRACE_S + 3)
        for process in stopped:
            process.resume()
        with pytest.raises(psutil.TimeoutExpired):
            supervisors[0].wait(2)
        cluster.wait_for(ALL)
        assert cluster.lives() == lives


def test_an_agent_starts_its_host_and_waits_for_the_others(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    started = ensure_etcd(cluster.settings(), cluster.environ)
    assert started is not None
    assert caplog.text.count("started a member of an embedded cluster on") == 3
    assert [it for it in caplog.records if it.levelname == "WARNING"] == []
    cluster.find()
    assert ensure_etcd(cluster.settings(), cluster.environ) is None
    assert cluster.state().members


def test_the_hosts_that_are_missing_are_named(cluster: Cluster) -> None:
    cluster.start(0)
    state = cluster.state().why_missing()
    first, second = (f"{address}:{cluster.port}" for address in cluster.addresses[:2])
    assert f"{first}: it waits for a majority of the 3" in state
    assert f"{second}: nothing answers on its supervisor's port" in state


def test_another_list_of_hosts_is_refused_with_both(cluster: Cluster) -> None:
    cluster.start(0)
    first = f"{cluster.addresses[0]}:{cluster.port}"
    other = settings(f"{first},192.0.2.1,192.0.2.2", secret=SECRET)
    with pytest.raises(
        EmbeddedEtcdError, match=rf"here .*192\.0\.2\.1:2379.*there .*{cluster.addresses[1]}"
    ):
        ensure_etcd(other, cluster.environ)


@pytest.mark.parametrize("cluster", [None, SECRET], indirect=True)
def test_a_node_that_names_one_of_the_hosts_only_is_refused(cluster: Cluster) -> None:
    cluster.start(0, 1)
    cluster.wait_for({0, 1})
    first = f"{cluster.addresses[0]}:{cluster.port}"
    with pytest.raises(
        EmbeddedEtcdError, match=rf"here {first}, there {first},{cluster.addresses[1]}"
    ):
        ensure_etcd(settings(first, secret=cluster.secret), cluster.environ)


def test_a_node_of_one_host_does_not_wait_for_a_supervisors_port(
    start: Start, ensure: Ensure, port: int
) -> None:
    """A firewall may drop what comes there."""
    start()
    with socket.create_server(("127.0.0.1", port + 2)) as silent:
        assert ensure() is None
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.parametrize("cluster", [None], indirect=True)
def test_a_host_whose_name_leads_to_its_loopback_is_reached_by_both_families(
    cluster: Cluster,
) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    made, listens = cluster.settings(), ("::",)
    places = tuple(
        Place(it.target, it.host, it.port, f"http://{it.host}:{it.port + 1}")
        for it in cluster_endpoints(made.connection)
    )
    order = ClusterOrder(0, places, listens, ())
    binary, wait = find_binary(cluster.environ), Wait("member", "::", LIMIT_S)
    started = launch(made, binary, listens, cluster.environ, wait, cluster=order)
    assert started is not None
    cluster.supervisors[0] = psutil.Process(started.supervisor_pid)
    for host in (cluster.addresses[0], "::1"):
        socket.create_connection((host, cluster.port + 2)).close()


def test_a_host_that_gets_another_list_later_does_not_disturb_nodes_that_work(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(0, 1)
    cluster.wait_for({0, 1})
    keeper = SeatKeeper(cluster.settings(), cluster.environ)
    third = f"{cluster.addresses[2]}:{cluster.port}"
    other = settings(f"{third},192.0.2.1,192.0.2.2", secret=SECRET)
    endpoints = cluster_endpoints(other.connection)
    seat = [it.target for it in endpoints].index(third)
    wait = Wait("member", third, LIMIT_S)
    started = start_seat(other, cluster.environ, endpoints, seat, wait)
    assert started is not None
    cluster.supervisors[2] = psutil.Process(started.supervisor_pid)
    keeper.look()
    keeper.look()
    (warned,) = caplog.messages
    assert f"{third}: it belongs to an embedded cluster of other hosts" in warned
    cluster.gateway(0).put(b"k", b"v")


def test_two_launches_at_once_make_one_member_of_each_host(
    cluster: Cluster, tmp_path: Path
) -> None:
    agents = [
        Agent(cluster.endpoints, cluster.environ, tmp_path / f"agent{number}.log", grace_s=GRACE_S)
        for number in range(2)
    ]
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(agent.close)
        for agent in agents:
            agent.go()
        assert [agent.error() for agent in agents] == ["", ""]
        cluster.find()
        assert len(cluster.supervisors) == 3
        cluster.wait_for(ALL)
        cluster.cluster()
        logs = "".join(agent.log() for agent in agents)
        assert logs.count("started a member of an embedded cluster on") == 3


def test_a_supervisors_port_that_is_taken_is_named(cluster: Cluster) -> None:
    with socket.create_server((cluster.addresses[1], cluster.port + 2)):
        with pytest.raises(
            EmbeddedEtcdError,
            match=rf"did not start at {cluster.addresses[1]}.*in use.*{cluster.port + 2}",
        ):
            ensure_etcd(cluster.settings(), cluster.environ)
        cluster.find()


@pytest.mark.parametrize("port", ["clients", "peers"])
def test_the_others_serve_without_a_host_whose_port_is_taken(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, port: str
) -> None:
    number = cluster.port + (port == "peers")
    with socket.create_server((cluster.addresses[1], number)):
        cluster.start(0, 1, 2)
        wait_until("the others serve", lambda: {0, 2} <= cluster.state().members, 120.0)

        def warned() -> str:
            caplog.clear()
            SeatKeeper(cluster.settings(), cluster.environ).look()
            (message,) = caplog.messages
            assert message.endswith("no more may be lost")
            return message

        where = f"{cluster.addresses[1]}:{cluster.port}: its etcd ended: "
        # Between two tries it is in the cluster, or about to be, until it finds the port taken.
        wait_until("the cause is named", lambda: where in (it := warned()) and "in use" in it)
    cluster.wait_for(ALL)


def test_an_etcd_of_another_cluster_at_an_endpoint_is_refused(
    cluster: Cluster,
) -> None:
    """Say, that of a launch with one host, in its grace: nodes that use it would be by
    themselves."""
    where = f"{cluster.addresses[1]}:{cluster.port}"
    alone = settings(where, secret=SECRET, embed_grace=60)
    started = ensure_etcd(alone, cluster.environ)
    assert started is not None
    other = psutil.Process(started.supervisor_pid)
    try:
        cluster.start(0, 2)
        cluster.wait_for({0, 2})
        with pytest.raises(
            EmbeddedEtcdError, match=f"not of this cluster answers at {cluster.addresses[1]}"
        ):
            ensure_etcd(cluster.settings(join_timeout=15), cluster.environ)
        cluster.find()
    finally:
        kill(other)
    ensure_etcd(cluster.settings(), cluster.environ)
    cluster.wait_for(ALL)


def test_a_supervisor_that_ended_is_started_again_by_a_node_of_its_host(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    keeper = SeatKeeper(cluster.settings(), cluster.environ)
    cluster.lose(1)
    keeper.look()
    cluster.find()
    assert "no supervisor of the embedded cluster's member on" in caplog.text
    cluster.wait_for(ALL)


def test_status_and_doctor_show_the_members_and_who_is_missing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", SECRET)
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    names = [f"{address}:{cluster.port}" for address in cluster.addresses]
    how = ("--endpoint", cluster.endpoints, "--conf", "embed=1")

    def shown(*words: str) -> str:
        done = run_here(capsys, ("status", *words, *how))
        return re.sub(r"\(up (\d\d?:\d\d:\d\d)\)", "(up)", done.out + done.err)

    def finding() -> tuple[str, str]:
        found = run_here(capsys, ("doctor", "--json", *how)).json["doctor"]["findings"]
        (it,) = (it for it in found if it["check"] == "etcd.members")
        return it["level"], it["text"]

    complete = f"embedded cluster with members on {' (up), '.join(names)} (up)\n"
    assert complete in shown()
    assert complete in shown("job")
    level, text = finding()
    assert (level, text.count(" (up 0:0")) == ("ok", 3)
    cluster.lose(1)
    why = "nothing answers on its supervisor's port"
    partial = f"members on {names[0]} (up), {names[2]} (up); {names[1]}: {why}\n"
    wait_until("it is noticed", lambda: partial in shown("job"))
    status = run_here(capsys, ("status", "job", "--json", *how)).json["status"]["cluster"]
    assert status["missing"] == {names[1]: why}
    assert {name: age_s > 0 for name, age_s in status["members"].items()} == {
        names[0]: True,
        names[2]: True,
    }
    level, text = finding()
    assert (level, text.endswith(f"; {names[1]}: {why}")) == ("warn", True)
    cluster.lose(2)
    wait_until("the majority is lost", lambda: not cluster.state().members)
    none = f"embedded cluster with members on no host; {names[0]}: "
    assert none in shown("job")
    level, text = finding()
    assert (level, text.startswith(none)) == ("fail", True)


_SECOND = {"seat": 1, "life": "b", "member": None, "leaves": False}


@pytest.mark.parametrize("cluster", [None], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        {"report": 1},
        {"age_s": math.nan},
        {"age_s": "1"},
        {"hosts": [1, {}]},
        None,
    ],
    ids=str,
)
def test_what_answers_for_a_supervisor_cannot_break_an_agent(
    cluster: Cluster, wrong: dict[str, object] | None
) -> None:
    hosts = [f"{address}:{cluster.port}" for address in cluster.addresses]
    good = {"hosts": hosts, "report": _SECOND, "age_s": 1.0, "trouble": "hm"}

    def seen(answer: bytes) -> str:
        with (
            socket.create_server((cluster.addresses[1], cluster.port + 2)) as server,
            ThreadPoolExecutor() as pool,
        ):
            asked = pool.submit(lambda: str(cluster.state()))
            with server.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer + b"\n")
                return asked.result()

    assert f"{hosts[1]}: hm" in seen(json.dumps(good).encode())
    line = b"[" * 10**6 if wrong is None else json.dumps(good | wrong).encode()
    assert re.search(rf"{hosts[1]}: (nothing answers|it belongs to .*there 1,{{}})", seen(line))


@pytest.mark.parametrize("cluster", [None], indirect=True)
@pytest.mark.parametrize("life", ["\0", "\ud800", "a,b=http://c:1", None])
def test_what_others_tell_a_supervisor_cannot_end_it(cluster: Cluster, life: str | None) -> None:
    cluster.start(0)
    hosts = [f"{address}:{cluster.port}" for address in cluster.addresses]
    report = {**_SECOND, "life": life}
    line = json.dumps({"hosts": hosts, "report": report, "unused_s": 0.0}).encode()
    where = cluster.addresses[0], cluster.port + 2
    with socket.create_connection(where) as client, client.makefile("rwb") as file:
        file.write(b"[" * 50_000 if life is None else line)
        file.write(b"\n")
        file.flush()
        assert file.readline() == b""
    assert set(cluster.state().answers) == {0}


@pytest.mark.parametrize("cluster", [None], indirect=True)
def test_what_an_etcd_answers_cannot_end_a_supervisor(cluster: Cluster) -> None:
    cluster.start(0)
    hosts = [f"{address}:{cluster.port}" for address in cluster.addresses]
    member = {"cluster": "c", "founders": [], "votes": True, "has_leader": True}
    line = json.dumps({"hosts": hosts, "report": {**_SECOND, "member": member}, "unused_s": 0.0})
    with (
        socket.create_server((cluster.addresses[1], cluster.port)) as etcd,
        socket.create_connection((cluster.addresses[0], cluster.port + 2)) as client,
    ):
        client.sendall(f"{line}\n".encode())
        etcd.settimeout(LIMIT_S)
        for _ in range(2):  # a read, and then the list
            with etcd.accept()[0] as asked:
                asked.recv(4096)
                asked.sendall(b'HTTP/1.0 200 OK\r\n\r\n{"members": 1}')
        why = "its etcd is not in the cluster yet"
        wait_until("it says why", lambda: why in cluster.state().answers[0].trouble)


@pytest.mark.parametrize(
    ("cluster", "ours", "why", "hint"),
    [
        (SECRET, None, "it speaks only TLS", "run it with the agents' RDZV_ETCD_EMBED_SECRET"),
        (SECRET, OTHER_SECRET, "it has another secret", "run it with the agents' RDZV_ETCD_EMBED_"),
        (None, SECRET, "it has no TLS", "run it without RDZV_ETCD_EMBED_SECRET"),
    ],
    indirect=["cluster"],
)
def test_doctor_finds_a_secret_that_is_not_the_clusters(
    cluster: Cluster,
    ours: str | None,
    why: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.start(0, 1)
    cluster.wait_for({0, 1})
    for name, secret in with_secret(ours).items():
        monkeypatch.setenv(name, secret)
    how = ("--endpoint", cluster.endpoints, "--conf", "embed=1,connect_timeout=3")
    found = run_here(capsys, ("doctor", "--json", *how)).json["doctor"]["findings"]
    (members,) = (it for it in found if it["check"] == "etcd.members")
    assert members["text"].count(why) == 2
    ways = [it for it in found if it["check"] == "etcd.endpoints"]
    assert [it["hint"].startswith(hint) for it in (members, *ways[:2])] == [True, True, True]


@pytest.mark.parametrize(
    ("endpoints", "why"),
    [
        ("h1,h2", "survives no more losses than with 1"),
        ("h1,h2,h3,h4", "three or five"),
        ("127.0.0.1,localhost,192.0.2.1", r"are the same address, 127\.0\.0\.1"),
        ("h1,h2,[fe80::1%eth0]", r"has a zone, which .*; write names, or addresses without"),
    ],
)
def test_lists_that_make_no_cluster_are_refused(endpoints: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        ensure_etcd(settings(endpoints, secret=SECRET), dict(os.environ))


@pytest.mark.slow
def test_a_host_whose_address_comes_after_its_node_is_a_member(
    etcd_binary: EtcdBinary, scratch: Path, tmp_path: Path, network: netns.Network
) -> None:
    """As the name of a new pod leads to it only some time after it has begun."""
    with ExitStack() as stack:
        hosts = [network.add_host() for _ in range(2)]
        late, port = f"{network.prefix}.200", free_port()
        endpoints = ",".join(f"{it}:{port}" for it in (*(it.address for it in hosts), late))
        environ = environment(etcd_binary.path, scratch)
        for number, host in enumerate(hosts):
            log = tmp_path / f"agent{number}.log"
            agent = Agent(endpoints, environ, log, within=host.enter(()), grace_s=60)
            stack.callback(agent.close)
            agent.go()
            stack.callback(netns.lose, host)
        made = settings(endpoints, embed_grace=60)
        assert ensure_etcd(made, environ) is None
        keeper = SeatKeeper(made, environ)
        keeper.look()
        network.add_address(late)
        keeper.look()
        name = f"{late}:{port}"
        supervisors = [it for it in psutil.process_iter(["cmdline"]) if name in _last_word(it)]
        for supervisor in supervisors:
            stack.callback(kill, supervisor)
        wait_until("it votes", lambda: cluster_state(made.connection).members == ALL)


def _last_word(process: psutil.Process) -> list[str]:
    return (process.info["cmdline"] or [""])[-1:]


@pytest.mark.slow
def test_each_host_is_cut_off_in_turn_while_nodes_work(
    etcd_binary: EtcdBinary, scratch: Path, tmp_path: Path, network: netns.Network
) -> None:
    """The nodes are in the namespace of the test; the hosts run agents that start the cluster."""
    with ExitStack() as stack:
        hosts = [network.add_host() for _ in range(3)]
        port = free_port()
        endpoints = ",".join(f"{host.address}:{port}" for host in hosts)
        environ = environment(etcd_binary.path, scratch)
        agents = [
            Agent(
                endpoints,
                environ,
                tmp_path / f"agent{number}.log",
                within=host.enter(()),
                grace_s=30,
            )
            for number, host in enumerate(hosts)
        ]
        for agent in agents:
            stack.callback(agent.close)
            agent.go()
        for agent in agents:
            supervisor = agent.supervisor()
            assert supervisor is not None
            stack.callback(kill, psutil.Process(supervisor))
            assert f"reach port {port}, {port + 1}, {port + 2} of its host controls" in agent.log()
        job = node_settings(endpoints, "job", "2")
        connection = job.connection

        def wait_for(members: set[int]) -> None:
            wait_until(
                f"the members are {members}",
                lambda: cluster_state(connection).members == members,
            )

        with Group(job) as first, Group(job) as second:
            epochs = [_reform([first, second])]
            for number, host in enumerate(hosts):
                wait_for(ALL)
                host.cut()
                epochs.append(_reform([first, second]))
                wait_for(ALL - {number})
                host.heal()
                epochs.append(_reform([first, second]))
            wait_for(ALL)
            assert epochs == sorted(set(epochs))
