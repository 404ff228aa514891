"""What one seat of an embedded cluster does next. Pure decisions, standard library only.

A **seat** is a named host. It runs at most one etcd at a time, its *member*, and each member begins
with an empty folder under a new identity, its **life**: no data and no identity is ever used twice.

A **cluster** is founded once: a seat that hears a majority of all seats, free and unused, draws a
random token and lists their lives as the founders. A seat that hears of a cluster that lists its
unused life starts as a founder; any other joins a cluster that has a leader, as a learner that is
promoted.

Two clusters never have a majority at the same time, whatever is lost, delayed or repeated:

1. In every configuration of every cluster each seat has a voter: a founding lists all seats, those
   not heard with a life that nobody will use, and a seat's old voters are removed only after a
   younger one of the same seat has been promoted (:func:`next_step`).
2. So a majority of voters takes living members on a majority of the seats, as a seat has one.
3. Two majorities of the seats share a seat, which runs a member of one cluster only.

No clock and no report has to be right for this. They decide only how soon a cluster serves. What
has to be right is that a seat is one machine: a name that moves to another one while the old one
still runs its member, cut off, makes two of one seat. On one machine the ports see to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

PEERS, SUPERVISORS = 1, 2
"""What is added to an endpoint's port for etcd's peers and for supervisors."""
SETTLE_S = 2.0
"""How long a majority of free seats waits for the others: later ones have to join one by one."""
LEADERLESS_S = 5.0
"""A member whose cluster has had no leader for so long may be given up: elections take a second."""
HOPELESS_S = 60.0
"""The same although enough members run: something between them is broken."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a seat's host is found."""

    name: str
    """As in the list of endpoints: host and port for clients."""
    host: str
    port: int
    """For clients; see :data:`PEERS`."""
    peer_url: str


@dataclass(frozen=True, slots=True)
class ClusterOrder:
    """What the supervisor of a seat is to do."""

    seat: int
    places: tuple[Place, ...]
    bind: tuple[str, ...]
    """The addresses at which it and its etcd listen."""
    peer_listen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """The etcd that a seat runs now."""

    cluster: str
    founders: tuple[str, ...] = ()
    """The lives that founded its cluster, by seat; empty if it has joined later."""
    votes: bool = True
    has_leader: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a seat says of itself."""

    seat: int
    life: str
    """Of its member; without one, that of its next. Empty while it can start none."""
    member: Member | None = None
    leaves: bool = False
    """Whether it was asked to end: others do not count on it any more."""


@dataclass(frozen=True, slots=True)
class View:
    """What a seat knows when it decides."""

    own: Report
    heard: Mapping[int, Report]
    """The others that have been heard lately."""
    seats: int
    """How many there are."""
    settled_s: float = 0.0
    """For how long the free seats have been the same."""
    leaderless_s: float = 0.0
    """For how long the own member has had no leader."""
    voters: int = 0
    """How many voters the own member's cluster has."""


class Do(Enum):
    """What a seat can do."""

    WAIT = "wait"
    FOUND = "found"
    JOIN = "join"
    ABANDON = "abandon"


@dataclass(frozen=True, slots=True)
class Decision:
    do: Do
    reason: str
    cluster: str = ""
    """To found or to join; empty: one that is to be drawn."""
    founders: tuple[str, ...] = ()


def majority(seats: int) -> int:
    return seats // 2 + 1


def decide(view: View) -> Decision:
    """Return what the seat does now."""
    member = view.own.member
    return _without_member(view) if member is None else _with_member(view, member)


def _without_member(view: View) -> Decision:
    own = view.own
    if not own.life:
        return Decision(Do.WAIT, "its etcd has failed and is started again in a moment")
    others = [report.member for report in view.heard.values() if report.member is not None]
    for member in sorted(others, key=lambda it: not it.has_leader):
        if own.life in member.founders[own.seat : own.seat + 1]:
            return Decision(Do.FOUND, "it is a founder", member.cluster, member.founders)
        if member.has_leader:
            return Decision(Do.JOIN, "a cluster has a leader", member.cluster)
    return _found(view, free_seats(view))


def _found(view: View, free: Mapping[int, str]) -> Decision:
    own = view.own
    if len(free) < majority(view.seats):
        return Decision(Do.WAIT, f"it waits for a majority of the {view.seats} hosts")
    if own.seat != min(free):
        return Decision(Do.WAIT, "another host begins the cluster")
    if len(free) < view.seats and view.settled_s < SETTLE_S:
        return Decision(Do.WAIT, "the other hosts may come in a moment")
    founders = tuple(free.get(seat, "") for seat in range(view.seats))
    return Decision(Do.FOUND, f"{len(free)} of {view.seats} hosts are there", founders=founders)


def _with_member(view: View, member: Member) -> Decision:
    if member.has_leader:
        return Decision(Do.WAIT, "its cluster has a leader")
    others = [report.member for report in view.heard.values()]
    if any(it is not None and it.has_leader and it.cluster != member.cluster for it in others):
        return Decision(Do.ABANDON, "another cluster has a leader")
    if view.leaderless_s < LEADERLESS_S or 1 + len(others) < majority(view.seats):
        return Decision(Do.WAIT, "its cluster has no leader")
    living = sum(
        it is not None and it.cluster == member.cluster and it.votes for it in (member, *others)
    )
    if living >= majority(view.voters) and view.leaderless_s < HOPELESS_S:
        return Decision(Do.WAIT, "its cluster elects a leader")
    return Decision(
        Do.ABANDON, f"{living} of {view.voters} members live, and other hosts are there"
    )


def free_seats(view: View) -> dict[int, str]:
    """Return the seats that could found a cluster, with their lives."""
    reports = (view.own, *view.heard.values())
    return {it.seat: it.life for it in reports if it.member is None and it.life}


def can_be_spared(view: View, told: Set[int]) -> bool:
    """Whether the own member's cluster keeps its majority without it. ``told``: the seats that have
    answered since they know that this one leaves. Of several that leave at once, none is spared.
    """
    member = view.own.member
    if member is None or not member.votes:
        return True
    stay = (it.member for seat, it in view.heard.items() if seat in told and not it.leaves)
    living = sum(it is not None and it.cluster == member.cluster and it.votes for it in stay)
    return living >= majority(view.voters)


# --- joining --------------------------------------------------------------------------------------


_RETIRED_PORT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A member in etcd's own list."""

    id: str
    url: str
    learner: bool


class Step(Enum):
    """A request to a cluster that a seat joins."""

    REMOVE = "remove"
    RETIRE = "retire"
    """Give an entry another address, so that a new member can have the seat's."""
    ADD = "add"
    PROMOTE = "promote"
    LEAVE = "leave"
    """No request: the own entry has been removed."""


def retired_url(seat: int, number: int) -> str:
    """Return where an old entry of a seat moves to: nothing listens there. ``number``: 16 bits."""
    return f"http://127.{100 + seat}.{number >> 8}.{number & 255}:{_RETIRED_PORT}"


def is_retired(url: str, seat: int) -> bool:
    """Return whether it is the address of an old entry of a seat."""
    # A member may have such an address, but no such port: peers' are above the clients'.
    return url.startswith(f"http://127.{100 + seat}.") and url.endswith(f":{_RETIRED_PORT}")


def next_step(
    entries: Sequence[Entry], seat: int, url: str, own_id: str
) -> tuple[Step, str] | None:
    """Return the next request with the entry it is about, ``None`` if there is nothing to do.

    ``entries`` must be the result of a linearizable read, ``url`` is where peers find the seat;
    ``own_id`` is empty before it is added.

    All other entries of this seat are of the dead. A voter among them may go only when the seat
    has another voter that lives: see the module. Another seat's learner stays, although etcd takes
    one at a time and its host may be lost: it may be promoted, and its seat's old voter removed,
    before a request to remove it arrives.
    """
    own = next((it for it in entries if it.id == own_id), None)
    dead = [it for it in entries if it.id != own_id and (it.url == url or is_retired(it.url, seat))]
    if own_id and own is None:
        return Step.LEAVE, ""
    if own is not None and own.learner:
        return Step.PROMOTE, own.id
    for entry in dead:
        if own is not None or entry.learner:
            return Step.REMOVE, entry.id
        if entry.url == url:
            return Step.RETIRE, entry.id
    return None if own_id else (Step.ADD, "")


# --- on the wire ----------------------------------------------------------------------------------

_DRAWN = re.compile(r"\w*", re.ASCII)
"""Lives and tokens are words of etcd's command line."""


def report_from(value: Any) -> Report:
    """Read what another seat has sent; raises ValueError."""
    fields = _typed(value, {"seat": int, "life": str, "member": (dict, type(None)), "leaves": bool})
    found, drawn, member = fields["member"], [fields["life"]], None
    if found is not None:
        found = _typed(found, {"cluster": str, "founders": list, "votes": bool, "has_leader": bool})
        member = Member(**{**found, "founders": tuple(found["founders"])})
        drawn += [member.cluster, *member.founders]
    if not all(isinstance(it, str) and _DRAWN.fullmatch(it) for it in drawn):
        raise ValueError("not drawn")
    return Report(fields["seat"], fields["life"], member, fields["leaves"])


def _typed(value: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(kinds):
        raise ValueError(f"not {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise ValueError(name)
    return value
