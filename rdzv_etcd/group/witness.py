"""Says of members in etcd that they are dead, and looks back whether that was right.

A node has up to two witnesses, its links and its program, and the mistakes of each are its own.
What they may say, and of whom, is theirs to decide.
"""

from __future__ import annotations

import contextlib
from functools import partial

from rdzv_etcd.core.accusations import answer_grace_s
from rdzv_etcd.core.member import Member, Phase
from rdzv_etcd.core.model import Accusation, NodeInfo
from rdzv_etcd.core.names import display_name
from rdzv_etcd.core.peer_ring import Mistakes
from rdzv_etcd.errors import EtcdError, LeaseNotFoundError, StateCorruptError
from rdzv_etcd.etcd.api import KeyValue
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import place_in

SETTLED_S = 2.0
"""Who has heard from etcd again only since then says of nobody that he is silent."""


class Witness:
    """What one of a node's witnesses has said. Everything raises EtcdError but :meth:`withdraw`."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self.mistakes = Mistakes()
        self._undecided: dict[str, float] = {}
        """Whom it has accused, and until when they may answer …"""
        self._made: dict[str, int] = {}
        """… and the revisions of that."""

    @property
    def has_made_any(self) -> bool:
        """Whether there is something to withdraw."""
        return bool(self._made)

    async def read(self, node_id: str) -> tuple[KeyValue, NodeInfo] | None:
        """A node's presence; ``None`` if there is none, or it is leaving."""
        kv, place = await self._read_place(node_id)
        if kv is None or not isinstance(place, NodeInfo) or place.leaving is not None:
            return None
        return kv, place

    async def _read_place(self, node_id: str) -> tuple[KeyValue | None, object]:
        """What stands in the place of a node's presence, as far as it can be read."""
        context = self._context
        result = await context.etcd.get(requests.read_presence(context.keys, node_id))
        for kv in result.kvs:
            with contextlib.suppress(StateCorruptError):  # the leader warns of it
                return kv, place_in(context.keys, kv)
        return None, None

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
        self._made[node_id] = made_at
        grace_s = answer_grace_s(context.session.round_trip_s, accusation)
        self._undecided[node_id] = context.clock.now_s() + grace_s
        return grace_s

    async def _made_at(self, node_id: str, accusation: Accusation) -> int:
        """At which revision this was said, 0 if it was not: one whose answer was lost is refused
        when it is repeated."""
        kv, place = await self._read_place(node_id)
        return kv.mod_revision if kv is not None and place == accusation else 0

    async def next_mistake(self) -> str | None:
        """Wait until those who were accused have been declared lost, or had the time to answer;
        return the first who has. Who was wrong about one may be wrong about the next."""
        context = self._context
        while self._undecided:
            node_id, until_s = next(iter(self._undecided.items()))
            is_lost = partial(self.is_declared_lost, node_id)
            while context.clock.now_s() < until_s and not is_lost():
                await context.wakeup.wait(until_s, when=is_lost)
            if not is_lost() and await self.read(node_id) is not None:
                self.note_mistake(node_id, until_s)
                return node_id
            self._undecided.pop(node_id, None)
        return None

    def is_declared_lost(self, node_id: str) -> bool:
        change = self._context.control.view.open_change
        return change is not None and change.may_name(node_id)

    def note_mistake(self, node_id: str, at_s: float) -> None:
        """Note that a node has answered, by ``at_s`` on the clock: nothing stands of what was said
        of it."""
        self.mistakes.note(node_id, at_s)
        self._undecided.pop(node_id, None)
        self._made.pop(node_id, None)

    def forget_undecided(self) -> None:
        """Do not look back at what was said of the members of another world."""
        self._undecided.clear()

    async def withdraw(self) -> None:
        """Delete what was said of members of an earlier world: nobody reads it now."""
        made, self._made = self._made, {}
        while made and self._member.phase is Phase.MEMBER:
            node_id, revision = next(iter(made.items()))
            txn = requests.withdraw_accusation(self._context.keys, node_id, revision)
            try:
                await self._context.etcd.txn(txn, repeatable=True)
            except EtcdError:
                break  # it goes with this node's session
            del made[node_id]
        self._made = made | self._made
