"""A job's keys as etcd holds them, decoded, and what that says about its nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from rdzv_etcd.protocol.model import Change, Leader, NodeInfo, Round


@dataclass(frozen=True, slots=True)
class Formed:
    """A round as it was committed."""

    record: Round
    epoch: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Here:
    """A presence as etcd holds it."""

    info: NodeInfo
    mod_revision: int
    seated: bool = False
    """Whether a round was formed with it since this node arrived: then it works there."""
    told: int = 0
    """The highest epoch of a round that its node had been told it is in when it put this."""
    is_back: bool = False
    """Whether etcd went back to an older snapshot, and its node has put nothing since: then it
    tells no more than was so when it was put. (What its node was in since, the record told.)"""
    returned_s: float | None = None
    """When etcd went back to a snapshot that holds it, if it had gone meanwhile."""


@dataclass(slots=True)
class State:
    """The job's keys as etcd holds them, and what is known of those that are no more."""

    round: Round | None = None
    round_revision: int = 0
    healthy_s: float | None = None
    """Since when there has been a round that nobody called over; ``None``: there is none."""
    leader: Leader | None = None
    change: Change | None = None
    nodes: dict[str, Here] = field(default_factory=dict)
    slices: dict[bytes, dict[str, int]] = field(default_factory=dict)
    went: dict[tuple[str, int], tuple[NodeInfo, float]] = field(default_factory=dict)
    """Presences that are no more, by their node and the round it had arrived for: what they said
    last, and until when. Of several that a node had, the latest need not be the one that a leader
    saw: snapshots may come back one after the other."""
    forgotten: dict[str, NodeInfo] = field(default_factory=dict)
    """What nodes said last where etcd went back to what they had said before: still true."""
    came: dict[str, float] = field(default_factory=dict)
    """When a node's presence appeared last."""
    store: set[bytes] = field(default_factory=set)
    """The keys of the rounds' stores."""
    ended_revision: int = 0
    """The revision at which etcd was told what has ended, 0 if it does not remember."""
    ended: dict[str, float] = field(default_factory=dict)
    """When each run was closed …"""
    retired: dict[str, float] = field(default_factory=dict)
    """… and with it the work of each of its members."""
    removers: set[str] = field(default_factory=set)
    """Who removed the job when nobody was there."""
    highest: dict[str, int] = field(default_factory=dict)
    """The highest epoch of a round that each node was told it is in."""
    woke: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of nodes whose machine was suspended last: since when, and until when."""
    opened_s: float | None = None
    """Since when the round there is has been called over; ``None``: nobody has."""
    domain: dict[str, str | None] = field(default_factory=dict)
    """The domain of every node that there ever was."""
    whole: dict[str, Counter[str | None]] = field(default_factory=dict)
    """By run: how many nodes each domain had, at most, in a world."""

    def note_woke(self, node_id: str, slept_s: float, at_s: float) -> None:
        """A node's machine was suspended for so long."""
        self.woke[node_id] = (at_s - slept_s, at_s)

    def note_jump(self, ahead_s: float) -> None:
        """A node's clock says that so much more time has passed."""
        self.woke.clear()
        if self.opened_s is not None:
            self.opened_s -= ahead_s

    def note_health(self, at_s: float) -> None:
        """Call it after every event."""
        record, change = self.round, self.change
        over = change is not None and change.concerns(record)
        if over or record is None or record.closure is not None:
            self.healthy_s = None
        elif self.healthy_s is None:
            self.healthy_s = at_s
        if not over:
            self.opened_s = None
        elif self.opened_s is None:
            self.opened_s = at_s

    @property
    def epoch(self) -> int:
        return 0 if self.round is None else self.round.epoch(self.round_revision)

    def put_node(self, info: NodeInfo, mod_revision: int, at_s: float) -> None:
        self.domain[info.node_id] = info.domain
        before = self.nodes.get(info.node_id)
        if before is None:
            self.came[info.node_id] = at_s
        else:
            self._note_gone(before.info, at_s)
        seated, told = self._is_seated(info, before), self.highest.get(info.node_id, 0)
        self.nodes[info.node_id] = Here(info, mod_revision, seated, told)
        self.forgotten.pop(info.node_id, None)

    def drop_node(self, node_id: str, at_s: float) -> None:
        here = self.nodes.pop(node_id, None)
        if here is not None:
            self._note_gone(here.info, at_s)

    def _note_gone(self, info: NodeInfo, at_s: float) -> None:
        self.went[info.node_id, info.arrived_for] = (info, at_s)

    def saved(self) -> State:
        """What a snapshot of etcd would hold now."""
        return replace(
            self,
            nodes=dict(self.nodes),
            slices=dict(self.slices),
            store=set(self.store),
            whole=dict(self.whole),
        )

    def go_back(self, saved: State, at_s: float) -> None:
        """Etcd holds again what it held when :meth:`saved` was called."""
        self.forgotten |= {node_id: here.info for node_id, here in self.nodes.items()}
        for node_id in set(self.nodes) - set(saved.nodes):
            self.drop_node(node_id, at_s)
        nodes = dict(saved.nodes)
        for node_id, here in saved.nodes.items():
            before = self.nodes.get(node_id)
            nodes[node_id] = replace(here, is_back=True)
            if before is not None and before.info == here.info:
                continue
            if before is None:
                self.came[node_id] = at_s
                nodes[node_id] = replace(nodes[node_id], returned_s=at_s)
            else:
                # Overwritten, as by a put: a leader may have seen it, and what the node said then
                # is still so. Who waits has come back, whatever etcd says.
                self._note_gone(before.info, at_s)
        self.nodes, self.slices = nodes, dict(saved.slices)
        self.store, self.whole = set(saved.store), dict(saved.whole)
        self.round, self.round_revision = saved.round, saved.round_revision
        self.leader, self.change = saved.leader, saved.change
        self.ended_revision = saved.ended_revision
        self.healthy_s = None

    def lose_all(self, at_s: float) -> None:
        """Etcd has lost its data."""
        for node_id in list(self.nodes):
            self.drop_node(node_id, at_s)
        self.round, self.round_revision, self.leader, self.change = None, 0, None, None
        self.ended_revision = 0
        self.slices.clear()
        self.healthy_s = None
        self.store.clear()

    def told_according_to_etcd(self, node_id: str) -> int:
        """The highest epoch of a round that a node was told it is in, as far as etcd can tell."""
        here, highest = self.nodes.get(node_id), self.highest.get(node_id, 0)
        return here.told if here is not None and here.is_back else highest

    def works_on(self, node_id: str) -> bool:
        """Whether a present node has not come back from a round of its own, the last or an earlier
        one; whatever the record says about it."""
        before = self.round
        if before is None or before.closure is not None:
            return False
        here = self.nodes[node_id]
        return here.seated and here.info.arrived_for <= before.number

    def waits(self, node_id: str) -> bool:
        """Whether a present node waits for the next round."""
        here, before = self.nodes[node_id], self.round
        if here.info.leaving is not None or here.info.finished or self.works_on(node_id):
            return False
        if before is None:
            return here.info.arrived_for <= 1 and here.mod_revision > self.ended_revision
        since_then = here.mod_revision > self.round_revision
        if before.closure is not None:
            return since_then
        # If the record was put back, only who has asked again gets a seat: a presence may have come
        # back with an older snapshot, long after its node had gone.
        asks_again = here.info.arrived_for > before.number
        all_named = before.slices is None
        if node_id in before.expelled and not asks_again:
            return False  # it had to ask again for an earlier round, and has not done so since
        return before.epoch_fixed is None or (asks_again and (all_named or since_then))

    def _is_seated(self, info: NodeInfo, before: Here | None) -> bool:
        """Whether a presence that was just put is that of a node at work, not of one that arrives.

        A member that puts its presence back says that it arrived for the round it works in, and
        where it listened then; each join has another port.
        """
        if before is not None and _arrival(before.info) == _arrival(info):
            return before.seated
        record = self.round
        return (
            record is not None
            and record.closure is None
            and info.node_id in record.members
            and info.arrived_for <= record.number
        )


def _arrival(info: NodeInfo) -> tuple[int, str, int]:
    return info.arrived_for, info.address, info.port
