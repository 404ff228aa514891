"""What disturbs a training in which nobody is lost: hosts, links and etcd are hurt, and healed.

Each function hurts once and returns how to heal it. Knows namespaces, firewalls, signals and where
nodes listen for their peers; knows nothing of what should come of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.etcd_server import BenchmarkEtcd
from benchmarks.jobs import TracedAgent, TracedJob
from tests.support.bridge import FaultBridge
from tests.support.netns import Host

Heal = Callable[[], None]
_RESET = ("-j", "REJECT", "--reject-with", "tcp-reset")


@dataclass
class Site:
    """One job, an agent on each host, and the way to its etcd."""

    job: TracedJob
    hosts: dict[TracedAgent, Host]
    etcd: BenchmarkEtcd
    bridge: FaultBridge
    """Before etcd."""
    mute: tuple[str, int]
    """Accepts connections, and never says a word."""
    turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def agents(self) -> list[TracedAgent]:
        return list(self.hosts)

    def next_agent(self) -> TracedAgent:
        """Return each agent in turn."""
        return self.agents[next(self.turns) % len(self.hosts)]

    def peer_port(self, agent: TracedAgent) -> int:
        """Where the agent listens for its peers, as its presence says."""
        found = self.etcd.keys(f"/rdzv_etcd/{self.job.options.run_id}/nodes/".encode())
        for key, value in found.items():
            if int(key.split(b"~")[1]) == agent.process.pid:
                return int(json.loads(value)["peer_port"])
        raise LookupError(f"agent {agent.name} is not there")

    def links(self, agent: TracedAgent) -> list[tuple[str, int]]:
        """Who watches the agent: the other ends of its open links."""
        port = self.peer_port(agent)
        listed = subprocess.run(
            self.hosts[agent].enter(["ss", "-Htn", f"sport = :{port}"]),
            check=True,
            capture_output=True,
            text=True,
        )
        ends = re.findall(rf":{port}\s+(\S+):(\d+)", listed.stdout)
        return [(address.strip("[]").removeprefix("::ffff:"), int(at)) for address, at in ends]


def nothing(_site: Site) -> Heal:
    return lambda: None


def stop_an_agent(site: Site) -> Heal:
    """SIGSTOP of the agent; its worker works on."""
    agent = site.next_agent()
    agent.process.send_signal(signal.SIGSTOP)
    return lambda: agent.process.send_signal(signal.SIGCONT)


def slow_network(site: Site) -> Heal:
    """150 ms each way and 5 % loss to etcd; between the hosts 5 % of all packets vanish."""
    site.bridge.shape(delay_s=0.15, jitter_s=0.02, loss=0.05)
    lose = ("-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP")
    rules = [_rule(site, agent, "INPUT", "-p", "tcp", *lose) for agent in site.agents]

    def heal() -> None:
        site.bridge.heal()
        for rule in rules:
            rule()

    return heal


def cut_links(site: Site) -> Heal:
    """What is for an agent's port for peers vanishes, both ways."""
    agent = site.next_agent()
    port = str(site.peer_port(agent))
    inbound = _rule(site, agent, "INPUT", "-p", "tcp", "--dport", port, "-j", "DROP")
    outbound = _rule(site, agent, "OUTPUT", "-p", "tcp", "--sport", port, "-j", "DROP")
    return _both(inbound, outbound)


def cut_links_one_way(site: Site) -> Heal:
    """The same in one direction only, in turn."""
    agent = site.next_agent()
    port = str(site.peer_port(agent))
    if next(site.turns) // len(site.hosts) % 2:
        return _rule(site, agent, "INPUT", "-p", "tcp", "--dport", port, "-j", "DROP")
    return _rule(site, agent, "OUTPUT", "-p", "tcp", "--sport", port, "-j", "DROP")


def reject_links(site: Site) -> Heal:
    """A firewall resets what is for a living agent's port: open links and new ones."""
    agent = site.next_agent()
    return _rule(site, agent, "INPUT", "-p", "tcp", "--dport", str(site.peer_port(agent)), *_RESET)


def reset_open_links(site: Site) -> Heal:
    """A middlebox forgets an agent's links, and resets them; new ones are let through."""
    return _reset_links(site, site.next_agent())


def reset_all_links(site: Site) -> Heal:
    return _both(*(_reset_links(site, agent) for agent in site.agents))


def mute_proxy(site: Site) -> Heal:
    """Open links are reset; new ones reach a proxy that accepts for the agent, and says nothing."""
    return _redirected(site, site.next_agent(), site.mute)


def another_answers(site: Site) -> Heal:
    """Open links are reset; new ones reach another node."""
    agent = site.next_agent()
    other = next(one for one in site.agents if one is not agent)
    return _redirected(site, agent, (site.hosts[other].address, site.peer_port(other)))


def etcd_away(site: Site) -> Heal:
    """No node reaches etcd, and all links are reset meanwhile."""
    healed = reset_all_links(site)
    site.bridge.refuse()
    return _both(site.bridge.heal, healed)


def busy_cores(_site: Site) -> Heal:
    """Eight endless loops per core."""
    cores = len(os.sched_getaffinity(0))
    loops = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
        for _ in range(8 * cores)
    ]

    def heal() -> None:
        for loop in loops:
            loop.kill()
            loop.wait()

    return heal


def _reset_links(site: Site, agent: TracedAgent) -> Heal:
    port = str(site.peer_port(agent))
    return _both(
        *(
            _rule(
                site,
                agent,
                "INPUT",
                *("-p", "tcp", "-s", address, "--sport", str(at), "--dport", port, *_RESET),
            )
            for address, at in site.links(agent)
        )
    )


def _redirected(site: Site, agent: TracedAgent, to: tuple[str, int]) -> Heal:
    port, address = str(site.peer_port(agent)), site.hosts[agent].address
    elsewhere = f"{to[0]}:{to[1]}"
    rules = [
        _rule(
            site,
            other,
            *("OUTPUT", "-p", "tcp", "-d", address, "--dport", port),
            *("-j", "DNAT", "--to-destination", elsewhere),
            table="nat",
        )
        for other in site.agents
        if other is not agent
    ]
    return _both(*rules, _reset_links(site, agent))


def _rule(site: Site, agent: TracedAgent, chain: str, *rule: str, table: str = "filter") -> Heal:
    host = site.hosts[agent]
    host.run("iptables", "-w", "-t", table, "-I", chain, *rule)
    return lambda: host.run("iptables", "-w", "-t", table, "-D", chain, *rule)


def _both(*heals: Heal) -> Heal:
    def heal() -> None:
        with contextlib.ExitStack() as stack:  # each, even if another one fails
            for one in heals:
                stack.callback(one)

    return heal
