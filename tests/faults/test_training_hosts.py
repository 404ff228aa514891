"""Training through real torchrun while its hosts and their ways to a living etcd are hurt.

One job of three nodes takes one fault after the other; the workers' step log judges. Each node has
a bridge of its own before etcd. One of them is in a network namespace, and the wall clocks of the
other two are an hour off all the time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.faults.servers import compacting
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.netns import Host, Network
from tests.support.servers import EtcdBinary, EtcdServer
from tests.torchrun.agents import WRONG_CLOCK, Agent, Job
from tests.torchrun.training import TTL_S, Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

_NAMES = ("far", "ahead", "behind")
_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True)
class Site:
    """The job, and the means to hurt it."""

    etcd: EtcdServer
    training: Training
    bridges: Mapping[str, FaultBridge]
    """By the node's name."""
    host: Host | None
    """The far node's, if this machine grants namespaces."""

    def agent(self, name: str) -> Agent:
        return next(agent for agent in self.training.agents if agent.name == name)

    def heal(self) -> None:
        """End what a failed test did not."""
        for bridge in self.bridges.values():
            bridge.heal()
        if self.host is not None:
            self.host.heal()
        self.agent("far").thaw()


@pytest.fixture(scope="module")
def shared_site(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        etcd = EtcdServer(etcd_binary, folder)
        stack.callback(etcd.kill)
        enter: Callable[[list[str]], list[str]] = list
        host, address, devices = None, etcd.host, {}
        if not netns.why_not():
            network = Network(folder)
            stack.callback(network.close)
            host = network.add_host()
            enter, address = host.enter, network.gateway
            devices = dict.fromkeys(_NAMES, network.gateway_device) | {"far": netns.DEVICE}
        etcd.start_on_free_ports()
        at = (etcd.host, etcd.port)
        bridges = {
            name: stack.enter_context(FaultBridge(at, host=address, seed=seed))
            for seed, name in enumerate(_NAMES)
        }
        training = Training(Job("", folder, nnodes="2:3", allreduce=True), lambda: etcd.gateway)
        stack.callback(training.close)
        for name, skew_s in zip(_NAMES, (0, _HOUR_S, -_HOUR_S), strict=True):
            training.start(
                name,
                endpoint=bridges[name].target,
                enter=enter if name == "far" else list,
                **({"launcher": (str(WRONG_CLOCK), str(skew_s))} if skew_s else {}),
                **({"GLOO_SOCKET_IFNAME": devices[name]} if devices else {}),
            )
        yield Site(etcd, training, bridges, host)


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The job, in its world of three."""
    try:
        shared_site.training.wait_for_world()
        shared_site.training.wait_present()
        yield shared_site
    finally:
        shared_site.heal()
        shared_site.training.report()


def test_wall_clocks_are_an_hour_off(site: Site) -> None:
    """Two of three, in both directions; longer than any lease. They are off in all other tests."""
    far, ahead, behind = (_first_logged_s(site.agent(name)) for name in _NAMES)
    assert (ahead - far) % _DAY_S == pytest.approx(_HOUR_S, abs=600)
    assert (far - behind) % _DAY_S == pytest.approx(_HOUR_S, abs=600)
    with site.training.undisturbed():
        site.training.train_for(3 * TTL_S)
        site.training.wait_present()


def _first_logged_s(agent: Agent) -> int:
    """Return the time of day when the agent began, by its own clock."""
    found = re.search(r"^I\d+ (\d\d):(\d\d):(\d\d)", agent.output, re.MULTILINE)
    assert found is not None
    hours, minutes, seconds = map(int, found.groups())
    return hours * 3600 + minutes * 60 + seconds


def test_etcd_compacts_every_second(site: Site) -> None:
    """Also what nodes have not read yet, cut off for a moment: they read again."""
    with site.training.undisturbed(), compacting(site.etcd.gateway, every_s=1.0) as times:
        site.training.train_for(TTL_S)
        for bridge in site.bridges.values():
            bridge.black_hole()
        done = times()
        site.training.wait_until("compactions", lambda: times() >= done + 2)
        for bridge in site.bridges.values():
            bridge.reset()  # watches must begin again, at a revision that is gone
            bridge.heal()
        site.training.wait_present()
        site.training.train_for(TTL_S)


@pytest.mark.release  # test_network.py has twice as much, without torchrun
def test_200_ms_latency_and_5_percent_loss(site: Site) -> None:
    """100 ms each way: no node is taken for lost."""
    with site.training.undisturbed():
        for bridge in site.bridges.values():
            bridge.shape(delay_s=0.1, jitter_s=0.02, loss=0.05)
        site.training.train_for(4 * TTL_S)
        site.training.wait_present()
        for bridge in site.bridges.values():
            bridge.heal()


def test_all_nodes_are_cut_off_and_come_back_one_by_one(site: Site) -> None:
    """For several TTLs; the leader comes back first, so it sees the others missing."""
    with site.training.undisturbed():
        leader = site.training.leader().name
        for bridge in site.bridges.values():
            bridge.black_hole()
        site.training.wait_present([])
        site.training.train_for(2 * TTL_S)
        for name in sorted(site.bridges, key=lambda name: name != leader):
            site.bridges[name].heal()
            time.sleep(TTL_S / 3)  # one by one is what is tested
        site.training.wait_present()


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(True, id="the_whole_node"),
        pytest.param(False, id="only_the_agent", marks=pytest.mark.release),
    ],
)
def test_an_agent_is_stopped_beyond_its_ttl_and_continues(site: Site, workers: bool) -> None:
    """SIGSTOP: the others form one world without it. SIGCONT: all form one world with it."""
    far = site.agent("far")
    with site.training.without(far), site.training.reformed_once():
        far.freeze(workers=workers)
    with site.training.reformed_once():
        far.thaw()


def test_a_node_is_cut_off_from_everything_beyond_its_ttl(site: Site) -> None:
    """Its cable is pulled. The others form one world without it, and one with it when it is back;
    no line of the old world's epoch comes after the first of a new one's."""
    if site.host is None:
        pytest.skip(netns.why_not())
    with site.training.without(site.agent("far")), site.training.reformed_once():
        site.host.cut()
    with site.training.reformed_once():
        site.host.heal()


def test_afterwards_the_job_ends_well(site: Site) -> None:
    site.training.finish()
