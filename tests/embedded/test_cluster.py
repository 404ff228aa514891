"""An embedded cluster of three with real processes; its hosts are three loopback addresses."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.cluster_start import (
    SeatKeeper,
    cluster_endpoints,
    cluster_state,
    start_seat,
)
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.world.group import Group
from tests.cli.tools import run_here
from tests.embedded.agents import (
    ALL,
    GRACE_S,
    LIMIT_S,
    SECRET,
    Agent,
    Cluster,
    environment,
    kill,
    settings,
    wait_for_end,
)
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
    cluster.start(0, 1, 2)
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
    cluster.start(0, 1, 2)
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


def test_hosts_that_were_stopped_for_longer_than_the_grace_continue(cluster: Cluster) -> None:
    """First the supervisors alone, then with their etcds, as virtual machines are."""
    cluster.start(0, 1, 2)
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
    state = cluster.state().missing()
    assert f"nothing answers on the supervisors' port of {cluster.addresses[1]}:" in state
    assert f"{cluster.addresses[0]}:{cluster.port}: it waits for a majority of the 3" in state


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


def test_a_host_that_gets_another_list_later_does_not_disturb_nodes_that_work(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start(0, 1)
    cluster.wait_for({0, 1})
    keeper = SeatKeeper(cluster.settings(), cluster.environ)
    third = f"{cluster.addresses[2]}:{cluster.port}"
    other = settings(f"{third},192.0.2.1,192.0.2.2", secret=SECRET)
    endpoints = cluster_endpoints(other.connection)
    deadline_s = time.monotonic() + LIMIT_S
    started = start_seat(
        other, cluster.environ, endpoints, [it.target for it in endpoints].index(third), deadline_s
    )
    assert started is not None
    cluster.supervisors[2] = psutil.Process(started.supervisor_pid)
    keeper.look()
    keeper.look()
    (warned,) = caplog.messages
    assert f"{third} belongs to an embedded cluster of other hosts" in warned
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
            match=rf"did not start at {cluster.addresses[1]}.*{cluster.port + 2}.*in use",
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
        cluster.wait_for({0, 2})

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
            ensure_etcd(cluster.settings(join_timeout=6), cluster.environ)
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
    assert "the supervisor of the embedded cluster's member on" in caplog.text
    cluster.wait_for(ALL)


def test_status_and_doctor_show_the_members_and_who_is_missing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", SECRET)
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    names = [f"{address}:{cluster.port}" for address in cluster.addresses]
    how = ("--endpoint", cluster.endpoints, "--conf", "embed=1")

    def findings() -> list[dict[str, str]]:
        found = run_here(capsys, ("doctor", "--json", *how)).json["doctor"]["findings"]
        return [it for it in found if it["check"] == "etcd.members"]

    complete = f"embedded cluster with members on {', '.join(names)}"
    assert complete in run_here(capsys, ("status", "job", *how)).out
    (finding,) = findings()
    assert (finding["level"], finding["text"]) == ("ok", complete)
    cluster.lose(1)
    partial = f"embedded cluster with members on {names[0]}, {names[2]}; nothing answers on the "
    partial += f"supervisors' port of {names[1]}"
    wait_until("it is noticed", lambda: cluster.state().members == {0, 2})
    wait_until("status shows it", lambda: partial in run_here(capsys, ("status", "job", *how)).out)
    (finding,) = findings()
    assert (finding["level"], finding["text"]) == ("warn", partial)
    cluster.lose(2)
    wait_until("the majority is lost", lambda: not cluster.state().members)
    (finding,) = findings()
    assert finding["level"] == "fail"
    assert finding["text"].startswith("embedded cluster with members on no host; nothing answers")


@pytest.mark.parametrize(
    ("endpoints", "why"),
    [
        ("h1,h2", "survives no more losses than with 1"),
        ("h1,h2,h3,h4", "three or five"),
        ("127.0.0.1,localhost,192.0.2.1", r"are the same address, 127\.0\.0\.1"),
    ],
)
def test_lists_that_make_no_cluster_are_refused(endpoints: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        ensure_etcd(settings(endpoints), dict(os.environ))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    if why_not := netns.why_not():
        pytest.skip(why_not)
    made = netns.Network(tmp_path)
    yield made
    made.close()


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
