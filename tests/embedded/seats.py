"""A model of an embedded cluster's hosts, for searches through what may happen to them.

The decisions are the real ones; etcd is its list of members, which changes only while a majority of
the voters lives. Requests and reports are delivered late, twice or never; hosts and members die at
any time and come back without memory or data.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rdzv_etcd.embedded import seat
from rdzv_etcd.embedded.seat import Decision, Do, Entry, Member, Report, Step, View

_KEPT = 8
"""Reports and requests in flight: each may be delivered late, and more than once."""
_ROUND_S = 0.5


class UnsafeError(AssertionError):
    """What must never happen."""


@dataclass
class Rules:
    """What is decided; a mutant replaces one of them."""

    decide: Callable[[View], Decision] = seat.decide
    next_step: Callable[..., tuple[Step, str] | None] = seat.next_step
    draws_new_lives: bool = True
    lists_absent: bool = True
    """Whether a founding lists the seats that have not been heard."""


@dataclass
class Cluster:
    """What etcd's members agree on."""

    entries: dict[str, Entry]
    removed: set[str] = field(default_factory=set)

    def voters(self) -> set[str]:
        return {it.id for it in self.entries.values() if not it.learner}


@dataclass
class Host:
    """A supervisor's memory and its etcd."""

    report: Report
    own_id: str = ""
    """The member's id in etcd."""
    is_joining: bool = False
    heard: dict[int, Report] = field(default_factory=dict)
    settled: tuple[dict[int, str], float] = field(default_factory=lambda: ({}, 0.0))
    leader_s: float = 0.0


def address(number: int) -> str:
    """All look like an old one of the first host, except for their port."""
    return f"http://127.100.0.{number}:2380"


class Hosts:
    """All hosts of one cluster; ``seed`` chooses what happens."""

    def __init__(self, count: int, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.now_s = 0.0
        self.clusters: dict[str, Cluster] = {}
        self.started: set[str] = set()
        self.owners: dict[str, int] = {}
        """Whose each entry is, by its id."""
        self.done = Counter[Step]()
        self._drawn = 0
        self.hosts = [Host(Report(number, self.draw())) for number in range(count)]
        self.said: list[list[Report]] = [[host.report] for host in self.hosts]
        self.requests: list[tuple[str, Step, str, int]] = []

    def draw(self) -> str:
        self._drawn += 1
        return f"life{self._drawn}"

    # -- etcd -------------------------------------------------------------------------------------

    def living(self, token: str, among: set[int] | None = None) -> set[str]:
        """The voters of a cluster that run."""
        voters = self.clusters[token].voters()
        return {
            host.own_id
            for number, host in enumerate(self.hosts)
            if host.report.member is not None
            and host.report.member.cluster == token
            and host.own_id in voters
            and (among is None or number in among)
        }

    def some(self) -> set[int]:
        """Choose a majority of the hosts, or all."""
        count = len(self.hosts)
        return set(self.random.sample(range(count), self.random.randint(count // 2 + 1, count)))

    def has_majority(self, token: str, among: set[int] | None = None) -> bool:
        voters = self.clusters[token].voters()
        return len(self.living(token, among)) >= seat.majority(len(voters))

    def check(self) -> None:
        serving = [token for token in self.clusters if self.has_majority(token)]
        if len(serving) > 1:
            raise UnsafeError(f"two clusters have a majority: {serving}")
        for token, cluster in self.clusters.items():
            for number in range(len(self.hosts)):
                if not any(self.is_of(it, number) for it in cluster.entries.values()):
                    raise UnsafeError(f"seat {number} has no voter in {token}")

    def is_of(self, entry: Entry, number: int) -> bool:
        return not entry.learner and self.owners[entry.id] == number

    def apply(self, token: str, step: Step, entry_id: str, number: int) -> str:
        """Commit a request; return the id of a new member, or nothing."""
        cluster = self.clusters[token]
        if not self.has_majority(token):
            return ""
        found = cluster.entries.get(entry_id)
        self.done[step] += found is not None or step is Step.ADD
        if step is Step.ADD:
            taken = any(it.learner or it.url == address(number) for it in cluster.entries.values())
            if not taken:
                made = f"{token}:{self.draw()}"
                self.owners[made] = number
                cluster.entries[made] = Entry(made, address(number), learner=True)
                return made
        elif found is not None and step is Step.REMOVE:
            del cluster.entries[entry_id]
        elif found is not None and step is Step.RETIRE:
            url = seat.retired_url(number, self.random.randrange(1 << 16))
            cluster.entries[entry_id] = replace(found, url=url)
        elif found is not None and step is Step.PROMOTE:
            cluster.entries[entry_id] = replace(found, learner=False)
        return ""

    # -- a supervisor -----------------------------------------------------------------------------

    def start(self, number: int, member: Member, own_id: str) -> None:
        host = self.hosts[number]
        if own_id in self.started:
            raise UnsafeError(f"{own_id} is started a second time")
        self.started.add(own_id)
        host.report = replace(host.report, member=member)
        host.own_id, host.leader_s = own_id, self.now_s

    def drop(self, number: int) -> None:
        host = self.hosts[number]
        life = self.draw() if self.rules.draws_new_lives else host.report.life
        host.report, host.own_id, host.is_joining = Report(number, life), "", False

    def forget(self, number: int) -> None:
        """The host loses power and comes back."""
        self.drop(number)
        self.hosts[number] = Host(self.hosts[number].report)

    def act(self, number: int, *, settled_s: float, leaderless_s: float) -> None:
        host = self.hosts[number]
        member = host.report.member
        voters = len(self.hosts) if member is None else len(self.clusters[member.cluster].voters())
        view = View(host.report, dict(host.heard), len(self.hosts), settled_s, leaderless_s, voters)
        decision = self.rules.decide(view)
        if decision.do is Do.ABANDON:
            self.drop(number)
        elif decision.do is Do.FOUND:
            self.found(number, decision)
        elif decision.do is Do.JOIN or host.is_joining:
            self.join(number, decision.cluster if member is None else member.cluster)

    def found(self, number: int, decision: Decision) -> None:
        token = decision.cluster or f"cluster{self.draw()}"
        entries = {}
        for other, life in enumerate(decision.founders):
            if life or self.rules.lists_absent:
                made = f"{token}:{other}:{life}"
                self.owners[made] = other
                entries[made] = Entry(made, address(other), learner=False)
        self.clusters.setdefault(token, Cluster(entries))
        own_id = f"{token}:{number}:{self.hosts[number].report.life}"
        self.start(number, Member(token, decision.founders), own_id)

    def join(self, number: int, token: str) -> None:
        host, cluster = self.hosts[number], self.clusters[token]
        if not self.has_majority(token):
            return
        own_id = host.own_id if host.is_joining else ""
        listed = list(cluster.entries.values())
        step = self.rules.next_step(listed, number, address(number), own_id)
        if step is None:
            host.is_joining = False
        elif step[0] is Step.LEAVE:
            self.drop(number)
        else:
            request = (token, step[0], step[1], number)
            self.requests = [*self.requests[-_KEPT:], request]
            if self.random.random() < 0.3:
                return  # it is delivered later, or never
            made = self.apply(*request)
            if made and self.random.random() < 0.9:  # otherwise the reply is lost
                self.start(number, Member(token, votes=False), made)
                host.is_joining = True

    def see(self, number: int, among: set[int] | None = None) -> None:
        """Let a host see how its member is."""
        host = self.hosts[number]
        member = host.report.member
        if member is None:
            return
        token = member.cluster
        entry = self.clusters[token].entries.get(host.own_id)
        leads = entry is not None and self.has_majority(token, among)
        votes = member.votes if entry is None or not leads else not entry.learner
        host.report = replace(host.report, member=replace(member, has_leader=leads, votes=votes))
        if leads:
            host.leader_s = self.now_s

    # -- what happens -----------------------------------------------------------------------------

    def happen(self) -> None:
        """One event, anywhere."""
        number = self.random.randrange(len(self.hosts))
        host, draw = self.hosts[number], self.random.random()
        if draw < 0.35:
            other = self.random.choice([it for it in range(len(self.hosts)) if it != number])
            host.heard[other] = self.random.choice(self.said[other][-_KEPT:])
        elif draw < 0.40:
            host.heard.pop(self.random.randrange(len(self.hosts)), None)
        elif draw < 0.55:
            self.see(number)
        elif draw < 0.60:
            self.drop(number)
        elif draw < 0.63:
            self.forget(number)
        elif draw < 0.70 and self.requests:
            self.apply(*self.random.choice(self.requests))
        else:
            settled_s, leaderless_s = (self.random.choice((0.0, 100.0)) for _ in range(2))
            self.act(number, settled_s=settled_s, leaderless_s=leaderless_s)
        self.say(number)
        self.check()

    def say(self, number: int) -> None:
        self.said[number] = [*self.said[number][-_KEPT:], self.hosts[number].report]

    def calm_down(self, there: set[int], limit_s: float) -> bool:
        """From now on ``there`` hear each other, and nothing fails. Return whether they serve."""
        for number, host in enumerate(self.hosts):
            host.settled, host.leader_s = ({}, self.now_s), self.now_s
            if not host.report.life:
                self.drop(number)
        until_s = self.now_s + limit_s
        while self.now_s < until_s:
            self.now_s += _ROUND_S
            for number in there:
                self.see(number, there)
                host = self.hosts[number]
                host.heard = {it: self.hosts[it].report for it in there if it != number}
                free = seat.free_seats(View(host.report, host.heard, len(self.hosts)))
                if host.settled[0] != free:
                    host.settled = (free, self.now_s)
                settled_s = self.now_s - host.settled[1]
                self.act(number, settled_s=settled_s, leaderless_s=self.now_s - host.leader_s)
                self.say(number)
                self.check()
            for token in self.clusters:
                voters = {it for it in there if self.hosts[it].own_id in self.living(token, there)}
                if self.has_majority(token, there) and voters == there:
                    return True
        return False
