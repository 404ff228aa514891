"""The state of a job at one moment, for people and tools: its nodes and their roles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from rdzv_etcd.names import display_name
from rdzv_etcd.protocol.census import Census, missing, take_census
from rdzv_etcd.protocol.model import Closure, Control, Drain, NodeInfo, Nodes, Presence
from rdzv_etcd.protocol.segments import choose, incomplete
from rdzv_etcd.protocol.world_end import change_of
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import WorldChange


class Stage(Enum):
    """The stage of a job."""

    ABSENT = "absent"
    """There is no round and no node, or none that can be read."""
    FORMING = "forming"
    """Nodes wait for the first world of a run."""
    WORKING = "working"
    """There is a world, and it is not over."""
    CHANGING = "changing"
    """The world is over, and the next one is being formed."""
    FINISHED = "finished"
    """It was closed because its work is done; for ``closed_ttl`` seconds."""
    FAILED = "failed"
    """It was closed because it has failed; for ``closed_ttl`` seconds."""


class Role(Enum):
    """The role of a node that is there."""

    MEMBER = "member"
    """It belongs to the world, and has not joined again."""
    RETURNING = "returning"
    """It belongs to the world, and has joined again: it waits for the next one."""
    WAITER = "waiter"
    """It waits for the next world, which has a seat for it."""
    SPARE = "spare"
    """It waits, and there is no seat for it."""
    FINISHED = "finished"
    """Its work is done: it waits for the others to finish, and is in no further world."""
    LEAVING = "leaving"
    """It has announced that it leaves."""
    STRANGER = "stranger"
    """It was started with other settings than the job's."""
    IDLE = "idle"
    """It is neither a member nor waits: it was expelled, or belongs to a run that is over."""


class _ReadOnly:
    """Its mappings are read-only, and it can be pickled all the same."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, MappingProxyType(dict(value)))

    def __reduce__(self) -> tuple[object, ...]:
        given = [getattr(self, name) for name in self.__slots__]
        plain = [dict(each) if isinstance(each, MappingProxyType) else each for each in given]
        return type(self), tuple(plain)


@dataclass(frozen=True, slots=True)
class NodeState(_ReadOnly):
    """One node that is there."""

    node_id: str
    """``<host>~<pid>~<random>``: names the process, not only the host."""
    host: str
    """Its host's name."""
    address: str
    """Where the other nodes reach it."""
    role: Role
    rank: int | None
    """Its rank in the world, ``None`` if it has none."""
    data: Mapping[str, object] = field(hash=False)
    """Its ``data``; read-only."""
    round_trip_s: float
    """etcd's latency for it when it joined; 0 if it is not known."""
    lease_id: int
    """Its session's lease in etcd; 0 if that is not known."""
    domain: str | None
    """Its ``domain_key``."""


@dataclass(frozen=True, slots=True)
class JobState(_ReadOnly):
    """One job at one moment, as recorded in etcd."""

    job: str
    """Its id."""
    revision: int
    """The revision of etcd that this is as of. Of a job of many nodes, read page by page, some may
    be as of a little later."""
    stage: Stage
    round: int
    """The number of the last round; 0: there was none, or it is forgotten."""
    epoch: int
    """Its epoch; 0 if there is no round."""
    members: tuple[str, ...]
    """The node ids of its members by rank. An unknown member (of a large world whose ranks etcd has
    lost for the moment) is called ``nobody~<rank>``."""
    master_address: str
    """The address of rank 0; empty if there is no round."""
    master_port: int
    settings: JobSettings | None
    """What all its nodes have agreed on; ``None`` if no node defines it."""
    leader: str | None
    """The node id of the one that closes rounds."""
    change: WorldChange | None
    """Why the world is over, ``None`` while it is not: as :attr:`rdzv_etcd.World.change`."""
    closure: Closure | None
    """How the job ended, while it counts as closed (``closed_ttl``)."""
    last_end: Closure | None
    """How the last run of it ended, if etcd remembers one (``ended_ttl``, a day)."""
    nodes: tuple[NodeState, ...]
    """All that are there: those with a rank by rank, then the others by arrival."""
    missing: Mapping[str, str] = field(hash=False)
    """The members that are not there, and how each was lost, as far as that is known."""
    unreadable: Mapping[str, str] = field(hash=False)
    """Foreign keys in the place of nodes: the name of each, and what is wrong with it."""
    incomplete: Mapping[str, tuple[int, int]] = field(hash=False)
    """The domains with nodes that wait for others, to make a segment whole: how many there are of
    it, and how many it takes."""
    job_lease_id: int
    """The lease that all of the job is on; 0 if there is no round."""
    job_lease_left_s: float | None = None
    """In how many seconds etcd removes the job if no node renews that lease; ``None`` if that was
    not read, or may not be."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The node ids of all that wait for the next world: members that have rejoined, newcomers,
        and spares."""
        waits = (Role.RETURNING, Role.WAITER, Role.SPARE)
        return tuple(node.node_id for node in self.nodes if node.role in waits)

    @property
    def spares(self) -> tuple[str, ...]:
        """The node ids of those that wait and have no seat."""
        return tuple(node.node_id for node in self.nodes if node.role is Role.SPARE)


def job_state(
    job: str, control: Control, nodes: Nodes, job_lease_left_s: float | None = None
) -> JobState:
    """Assemble the state of a job; ``control`` also names all members of a large world."""
    record = control.round
    settings = settings_of(control, nodes)
    census, spares, lacking = Census((), (), (), (), {}, (), ()), set[str](), {}
    if settings is not None:
        census = take_census(control, nodes, settings)
        candidates = census.candidates(nodes)
        spares = _spares(control, census, candidates, settings)
        lacking = incomplete(candidates, settings, control.formed)
    members = () if record is None else record.members
    there = _nodes(census, nodes, members, spares)
    return JobState(
        job,
        control.revision,
        _stage(control, nodes),
        0 if record is None else record.number,
        _epoch(control),
        members,
        "" if record is None else record.master_address,
        0 if record is None else record.master_port,
        settings,
        None if control.leader is None else control.leader.node_id,
        None if control.open_change is None else change_of(control.open_change),
        control.closure,
        control.ended[-1].closure if control.ended else None,
        there,
        missing(control, nodes, census),
        {node_id: what.problem for node_id, what in nodes.unreadable.items()},
        lacking,
        0 if record is None else record.job_lease,
        job_lease_left_s,
    )


def is_gone(control: Control, nodes: Nodes, formed_at: int) -> bool:
    """Whether the last run is over though nobody closed it: all its nodes died, or left, and its
    keys have expired. ``formed_at``: etcd's revision when the last round was formed of which it
    has an audit, 0 if it has none."""
    if control.round is not None or control.leader is not None or nodes.present:
        return False
    remembers_a_world = control.epoch_lease != 0 and not control.ended
    return formed_at > control.ended_revision or remembers_a_world


def settings_of(control: Control, nodes: Nodes) -> JobSettings | None:
    """Return the settings of a job: its world's, or those that nodes which arrive for the first
    world must have; ``None`` if no node is there to define them."""
    if control.formed is not None:
        return control.formed.settings
    if control.leader is not None:  # after the end of a run the next one may have others
        return control.leader.settings
    if control.round is not None:
        return control.round.settings
    first = min(nodes.present.values(), key=lambda presence: presence.order, default=None)
    return None if first is None else first.info.settings


def asked_to_leave(control: Control, nodes: Nodes) -> dict[str, Drain]:
    """Return the requests to leave of nodes that are there, and of members that may come back.

    A request outlives a node that died before it had learned of it.
    """
    formed, change = control.formed, control.open_change
    lost = {} if change is None else change.lost
    expected = set() if formed is None else set(formed.members) - lost.keys()
    return {
        node_id: drain
        for node_id, drain in control.drains.items()
        if node_id in nodes.present or node_id in expected
    }


def _stage(control: Control, nodes: Nodes) -> Stage:
    if control.closure is not None:
        return Stage.FINISHED if control.closure.succeeded else Stage.FAILED
    if control.formed is not None:
        return Stage.WORKING if control.open_change is None else Stage.CHANGING
    return Stage.FORMING if nodes.present else Stage.ABSENT


def _epoch(control: Control) -> int:
    """Return that of the last world: a closed job's marker has another revision."""
    if control.closure is not None and control.ended:
        return control.ended[-1].epoch
    return control.epoch


def _spares(
    control: Control, census: Census, candidates: Sequence[NodeInfo], settings: JobSettings
) -> set[str]:
    """Return the newcomers for whom the next world has no seat."""
    segments = choose(candidates, settings, control.formed)
    seated = {node.node_id for segment in segments for node in segment.nodes}
    if control.formed is None and len(seated) < settings.largest:
        return set()  # before the first round others will join
    return {each.info.node_id for each in census.newcomers} - seated


def _nodes(
    census: Census, nodes: Nodes, members: tuple[str, ...], spares: set[str]
) -> tuple[NodeState, ...]:
    ranks = {node_id: rank for rank, node_id in enumerate(members)}
    roles = dict.fromkeys(census.expected, Role.MEMBER)
    roles |= {presence.info.node_id: Role.RETURNING for presence in census.returning}
    roles |= {presence.info.node_id: Role.WAITER for presence in census.newcomers}
    roles |= {presence.info.node_id: Role.STRANGER for presence in census.strangers}
    roles |= dict.fromkeys(spares, Role.SPARE)
    roles |= dict.fromkeys(census.finished, Role.FINISHED)

    def role(info: NodeInfo) -> Role:
        return Role.LEAVING if info.leaving is not None else roles.get(info.node_id, Role.IDLE)

    def place(presence: Presence) -> tuple[int, int, str]:
        node_id = presence.info.node_id
        return ranks.get(node_id, len(ranks)), *presence.order

    return tuple(
        NodeState(
            presence.info.node_id,
            display_name(presence.info.node_id),
            presence.info.address,
            role(presence.info),
            ranks.get(presence.info.node_id),
            presence.info.data,
            presence.info.round_trip_ms / 1000,
            presence.lease_id,
            presence.info.domain,
        )
        for presence in sorted(nodes.present.values(), key=place)
    )
