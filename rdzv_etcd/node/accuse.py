"""Says of members in etcd that they are dead, and looks back whether that was right.

A node has up to two witnesses, its links and its program, and the mistakes of each are its own.
What they may say, and of whom, is theirs to decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rdzv_etcd.errors import EtcdError, LeaseNotFoundError, StateCorruptError
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.accusations import answer_grace_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.names import display_name
from rdzv_etcd.protocol.ring import Mistakes
from rdzv_etcd.protocol.views import place_in

SETTLED_S = 2.0
"""Who has heard from etcd again only since then says of nobody that he is silent."""


@dataclass(frozen=True, slots=True)
class Place:
    """What stands where a node's presence belongs."""

    kv: KeyValue | None = None
    """The key, if there is one …"""
    holds: NodeInfo | Accusation | None = None
    """… and what it says, if that can be read."""

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


@dataclass(frozen=True, slots=True)
class _Made:
    """An accusation, as who made it remembers it."""

    revision: int
    epoch: int
    """Of the world whose members were told of it."""


class Witness:
    """What one of a node's witnesses has said. Everything raises EtcdError but :meth:`withdraw`."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self.mistakes = Mistakes()
        self._undecided: dict[str, float] = {}
        """Whom it has accused and not looked at since, and until when they may answer."""
        self._made: dict[str, _Made] = {}
        """What it has said, and has neither withdrawn nor found to be wrong."""

    @property
    def has_made_any(self) -> bool:
        """Whether there is something to withdraw."""
        return bool(self._made)

    async def read(self, node_id: str) -> Place:
        """What stands in the place of a node's presence."""
        context = self._context
        result = await context.etcd.get(requests.read_presence(context.keys, node_id))
        if not result.kvs:
            return Place()
        (kv,) = result.kvs
        try:
            return Place(kv, place_in(context.keys, kv))
        except StateCorruptError:  # the leader warns of it
            return Place(kv)

    async def accuse(self, node_id: str, presence: KeyValue, accusation: Accusation) -> float:
        """Put the accusation in the place of the presence that was read, on this node's session.

        Returns how long the accused may take to answer, in seconds; 0 if the presence is another
        one by now, or there is no session.
        """
        context = self._context
        session = context.session.lease_id
        if not session:  # on no lease it would stay for ever
            return 0.0
        txn = requests.accuse(context.keys, node_id, presence, accusation, session)
        try:
            result = await context.etcd.txn(txn, repeatable=True)
        except LeaseNotFoundError:
            context.session.lost(session)
            return 0.0
        made_at = result.revision if result.succeeded else await self._made_at(node_id, accusation)
        if not made_at:
            return 0.0
        context.log.say(f"{display_name(node_id)}: {accusation.how}")
        self._made[node_id] = _Made(made_at, context.control.view.epoch)
        grace_s = answer_grace_s(context.session.round_trip_s, accusation)
        self._undecided[node_id] = context.clock.now_s() + grace_s
        return grace_s

    async def _made_at(self, node_id: str, accusation: Accusation) -> int:
        """At which revision this was said, 0 if it was not: one whose answer was lost is refused
        when it is repeated."""
        place = await self.read(node_id)
        return place.kv.mod_revision if place.kv is not None and place.holds == accusation else 0

    async def next_mistake(self) -> str | None:
        """Wait until those who were accused have been declared lost, or had the time to answer;
        return the first who has. Who was wrong about one may be wrong about the next."""
        context = self._context
        while self._undecided:
            node_id, until_s = next(iter(self._undecided.items()))
            is_decided = partial(self._is_decided, node_id)
            while context.clock.now_s() < until_s and not is_decided():
                await context.wakeup.wait(until_s, when=is_decided)
            place = Place() if is_decided() else await self.read(node_id)
            if self.look_back(node_id, place, until_s):
                return node_id
        return None

    def is_declared_lost(self, node_id: str) -> bool:
        change = self._context.control.view.open_change
        return change is not None and change.may_name(node_id)

    def _is_decided(self, node_id: str) -> bool:
        """Whether the node's presence no longer says that this witness was wrong about it: it was
        declared lost, or there is another world, into which the lost may come back."""
        made = self._made.get(node_id)
        is_over = made is None or made.epoch != self._context.control.view.epoch
        return is_over or self.is_declared_lost(node_id)

    def look_back(self, node_id: str, place: Place, at_s: float) -> bool:
        """Tell whether this witness was wrong about a node that had the time to answer, by ``at_s``
        on the clock. If so, nothing stands of what it has said.

        Once a world is over nobody is declared lost in it any more: who has not answered by then
        was as good as dead, and comes back for the next world.
        """
        is_first_look = self._undecided.pop(node_id, None) is not None
        is_open = self._context.control.view.open_change is not None
        is_too_late = is_open and not is_first_look
        if place.presence is None or self._is_decided(node_id) or is_too_late:
            return False
        self.mistakes.note(node_id, at_s)
        del self._made[node_id]
        return True

    async def withdraw(self) -> None:
        """Delete what was said of members of an earlier world: nobody reads it now. If this is
        cancelled, call it again."""
        made, self._made = self._made, {}
        try:
            while made and self._member.phase is Phase.MEMBER:
                node_id, one = next(iter(made.items()))
                txn = requests.withdraw_accusation(self._context.keys, node_id, one.revision)
                await self._context.etcd.txn(txn, repeatable=True)
                del made[node_id]
        except EtcdError:
            pass  # it goes with this node's session
        finally:
            self._made = made | self._made
