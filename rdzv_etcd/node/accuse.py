"""Accusations: suspicions in etcd that a member is dead, and what becomes of them.

A node accuses others because of its links (:mod:`rdzv_etcd.node.peers`), and ``rdzv-etcd evict``
for an operator. A node that lives refutes both in the same way: see
:mod:`rdzv_etcd.protocol.liveness`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rdzv_etcd.errors import EtcdError, LeaseNotFoundError, StateCorruptError
from rdzv_etcd.etcd.port import Etcd, KeyValue
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.liveness import LocalHealth, answer_grace_s
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.views import place_in
from rdzv_etcd.world_change import may_be_gone

_SETTLED_S = 2.0
"""A node that has been in contact with etcd for less than this accuses no node of being silent."""
_ROOM_S = 1.0
"""A member may be accused so long after it began to watch its own presence: then it can answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """The key of a node's presence, and its value."""

    kv: KeyValue | None = None
    """``None``: there is no such key."""
    holds: NodeInfo | Accusation | None = None
    """``None``: no node wrote what is there."""

    @property
    def presence(self) -> tuple[KeyValue, NodeInfo] | None:
        """The node's presence; ``None`` if there is none, or it is leaving."""
        kv, info = self.kv, self.holds
        if kv is None or not isinstance(info, NodeInfo) or info.leaving is not None:
            return None
        return kv, info

    @property
    def is_vacant(self) -> bool:
        """Whether the node has no presence: nothing is there, or an accusation."""
        return self.kv is None or isinstance(self.holds, Accusation)


async def read_place(etcd: Etcd, keys: JobKeys, node_id: str) -> Place:
    """Read what stands in the place of a node's presence. Raises EtcdError."""
    result = await etcd.get(requests.read_presence(keys, node_id))
    return place_of(keys, next(iter(result.kvs), None))


def place_of(keys: JobKeys, kv: KeyValue | None) -> Place:
    """Decode what stands there."""
    if kv is None:
        return Place()
    try:
        return Place(kv, place_in(keys, kv))
    except StateCorruptError:  # the leader warns of it
        return Place(kv)


async def put_accusation(
    etcd: Etcd, keys: JobKeys, presence: KeyValue, accusation: Accusation, lease_id: int
) -> int:
    """Replace a presence that was read with an accusation, on a lease of the accuser's.

    Returns the accusation's revision; 0 if the presence has changed since. Raises EtcdError.
    """
    node_id = keys.node_id(presence.key)
    txn = requests.accuse(keys, node_id, presence, accusation, lease_id)
    result = await etcd.txn(txn, repeatable=True)
    if result.succeeded:
        return result.revision
    # A request whose answer was lost is refused when it is repeated.
    place = await read_place(etcd, keys, node_id)
    return place.kv.mod_revision if place.kv is not None and place.holds == accusation else 0


@dataclass(frozen=True, slots=True)
class _Made:
    """An accusation, as its accuser remembers it."""

    revision: int
    epoch: int
    """Of the world whose members it was made for."""
    decided_s: float
    """By when the accused answers, if it lives."""


class Accuser:
    """The accusations that a node makes because of its links, and how far these are to be trusted.
    What reads or writes raises EtcdError."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._health = LocalHealth()
        self._made: dict[str, _Made] = {}
        """The accusations that were neither withdrawn nor refuted."""
        self._entered_s = 0.0
        """When this node became a member of its world."""

    # -- when -------------------------------------------------------------------------------------

    def note_world(self) -> None:
        """Note that this node has just become a member of a world."""
        self._entered_s = self._context.clock.now_s()

    def earliest_s(self) -> float:
        """From when on a member of this world may be accused of being silent: it can answer by
        then, and this node has been in contact with etcd for a while."""
        in_contact_since_s = self._context.session.in_contact_since_s()
        return max(self._entered_s + _ROOM_S, in_contact_since_s + _SETTLED_S)

    def quiet_until_s(self, node_id: str) -> float:
        """Until when that member may not be accused, because earlier accusations were refuted."""
        return self._health.quiet_until_s(node_id, self._context.clock.now_s())

    # -- suspect ----------------------------------------------------------------------------------

    async def read(self, node_id: str) -> Place:
        """Read what stands in the place of a node's presence."""
        return await read_place(self._context.etcd, self._context.keys, node_id)

    async def accuse(self, node_id: str, presence: KeyValue, accusation: Accusation) -> bool:
        """Put the accusation in the place of the presence that was read, on this node's session;
        ``False`` if the presence is another one by now, or there is no session."""
        context = self._context
        session = context.session.lease_id
        if not session:  # on no lease it would stay forever
            return False
        try:
            revision = await put_accusation(
                context.etcd, context.keys, presence, accusation, session
            )
        except LeaseNotFoundError:
            context.session.lost(session)
            return False
        if not revision:
            return False
        context.log.info(may_be_gone(context.log.names(node_id), accusation.how))
        grace_s = answer_grace_s(context.session.round_trip_s, accusation)
        decided_s = context.clock.now_s() + grace_s
        self._made[node_id] = _Made(revision, context.control.view.epoch, decided_s)
        return True

    # -- refuted, or confirmed --------------------------------------------------------------------

    def is_declared_lost(self, node_id: str) -> bool:
        change = self._context.control.view.open_change
        return change is not None and change.may_name(node_id)

    async def until_decided(self, node_id: str) -> None:
        """Wait until that node, if it is accused, was declared lost or has had time to answer."""
        made = self._made.get(node_id)
        if made is not None:
            is_decided = partial(self._is_confirmed, node_id, made)
            await self._context.wakeup.wait(made.decided_s, when=is_decided)

    def is_refuted(self, node_id: str, place: Place, *, is_late: bool = False) -> bool:
        """Return whether ``place`` shows that the accusation of that node was wrong, which is
        noted. ``is_late``: the node had not answered when it should have.

        Once a world is over, no node is declared lost in it any more: one that has not answered by
        then was as good as dead, and comes back for the next world.
        """
        if place.presence is None or node_id not in self._made:
            return False
        is_confirmed = self._is_confirmed(node_id, self._made.pop(node_id))
        if is_confirmed or (is_late and self._context.control.view.open_change is not None):
            return False
        self._health.note_refuted(node_id, self._context.clock.now_s())
        return True

    def _is_confirmed(self, node_id: str, made: _Made) -> bool:
        """Whether the node's presence no longer shows that it was accused wrongly: it was declared
        lost, or there is another world, into which the lost may come back."""
        return made.epoch != self._context.control.view.epoch or self.is_declared_lost(node_id)

    # -- withdrawn --------------------------------------------------------------------------------

    @property
    def has_made_any(self) -> bool:
        """Whether there may be something to withdraw."""
        return bool(self._made)

    async def withdraw(self) -> None:
        """Delete the accusations of members of earlier worlds: they are of no more use."""
        context = self._context
        for node_id, made in tuple(self._made.items()):
            txn = requests.withdraw_accusation(context.keys, node_id, made.revision)
            try:
                await context.etcd.txn(txn, repeatable=True)
            except EtcdError:
                return  # tried again in the next world; at last they go with this node's session
            if self._made.get(node_id) is made:
                del self._made[node_id]
