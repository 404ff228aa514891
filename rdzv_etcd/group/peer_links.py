"""Watches the next member over a link, and says in etcd that it is gone when it is.

Who watches whom is decided in :mod:`rdzv_etcd.core.peer_ring`, when a node that was accused counts
as lost in :mod:`rdzv_etcd.core.accusations`. Nothing here is on the way of a round that is being
formed, and nothing waits for it: where a link cannot be had, a death is noticed by its lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from rdzv_etcd.core.member import Member, Phase
from rdzv_etcd.core.model import Accusation, NodeInfo, display_name
from rdzv_etcd.core.peer_ring import Mistakes, how_gone, how_silent, ring_after, ring_in_slice
from rdzv_etcd.errors import EtcdError, LeaseNotFoundError, StateCorruptError
from rdzv_etcd.etcd.api import KeyValue
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.peers.api import Answer, Contact, End, Link, Peer, PeerNetwork
from rdzv_etcd.schema import requests
from rdzv_etcd.schema.control import place_in

_CONTACT_S = 5.0
"""How long a first contact may take: the other node may be about to begin to answer."""
_RECONTACT_S = 0.5
"""How long a node is looked for whose link has ended: a process that dies takes some milliseconds,
and its host answers for it all the while; and of a living one's packets some may be lost."""
_NEXT_TRY_S = 0.1
"""After this long without an answer, it is asked once more beside."""
_TRIES = 4
_BETWEEN_TRIES_S = 0.001
_ANSWER_S = 1.0
"""After this long a node that was accused wrongly has put its presence back."""
_RETRY_S = 5.0
_ROOM_FOR_A_WORLD_S = 0.3
"""Workers are started, and agents exchange their ranks; meanwhile the neighbour in the world before
is watched."""
_SETTLED_S = 2.0
"""Who has heard from etcd again only since then calls nobody silent."""


class PeerLinks:
    """One node's links: the one over which it watches, and those over which it is watched."""

    def __init__(self, context: NodeContext, member: Member, network: PeerNetwork) -> None:
        self._context = context
        self._member = member
        self._network = network
        self._mistakes = Mistakes()
        self._warned: set[str] = set()
        self._deaths = 0
        """How many members of the present ring were found to be gone."""
        self._doubts: dict[str, float] = {}
        """Members without presence, and when to look whether they have put it back …"""
        self._looked_for: set[str] = set()
        """… which is done once while they stay away."""
        self._made: dict[str, int] = {}
        """Whom this node has accused, and the revisions of that."""
        self._me = member.node_id
        member.watch_early()

    @property
    def port(self) -> int:
        """Where others reach this node; 0: nowhere."""
        return self._network.port

    async def close(self) -> None:
        """Say good-bye, so that nobody takes this node for dead. Idempotent."""
        await self._network.close()

    async def run(self) -> None:
        """Answer for this node and watch its neighbour, until cancelled."""
        member, wakeup = self._member, self._context.wakeup
        while not member.hears_accusations:
            await wakeup.wait(when=lambda: member.hears_accusations)
        await self._network.admit(self._peer(self._me))
        while True:
            epoch = member.epoch
            await self._tend(epoch)
            await self._withdraw()

    def _peer(self, node_id: str) -> Peer:
        return Peer(f"{self._context.settings.prefix}/{self._context.settings.job_id}", node_id)

    def _ring(self) -> tuple[str, ...]:
        member = self._member
        record = member.record
        if record is None:
            return ()
        if record.slices is None:
            return ring_after(record.members, member.node_id)
        mine = member.slice_of(record)
        return () if mine is None else ring_in_slice(mine.ranks, member.node_id)

    async def _tend(self, epoch: int) -> None:
        """Watch the members of the world that this node is in, until it is in another one: also
        while it waits for the next round, which would be formed with a dead node."""
        member, context = self._member, self._context
        ring = self._ring()
        self._deaths = 0
        self._doubts.clear()
        self._looked_for.clear()
        watching = self._begin(ring)
        try:
            while member.epoch == epoch:
                until_s = min(self._doubts.values(), default=None)
                news = partial(self._has_news, epoch, watching, len(self._doubts))
                await context.wakeup.wait(until_s, when=news)
                if watching.done():
                    watching.result()
                if await self._are_back():
                    await _end(watching)
                    watching = self._begin(ring)
            await context.clock.sleep(_ROOM_FOR_A_WORLD_S)
        finally:
            await _end(watching)

    def _has_news(self, epoch: int, watching: asyncio.Task[None], doubts: int) -> bool:
        return self._member.epoch != epoch or watching.done() or len(self._doubts) != doubts

    def _begin(self, ring: Sequence[str]) -> asyncio.Task[None]:
        watching = asyncio.ensure_future(self._watch(ring))
        watching.add_done_callback(lambda _: self._context.wakeup.notify())
        return watching

    async def _watch(self, ring: Sequence[str]) -> None:
        """Watch the next one that is there; when it is gone, the one after it."""
        for node_id in ring:
            await self._watch_one(node_id)
        await asyncio.Event().wait()  # nobody is left

    async def _watch_one(self, node_id: str) -> None:
        """Watch that node until it is gone. A link that cannot be had is tried again, rarely."""
        clock = self._context.clock
        while True:
            try:
                info = await self._look_up(node_id)
                if info is None:
                    self._doubt(node_id)  # it may be putting its presence back
                    return
                self._looked_for.discard(node_id)
                if not info.peer_port:
                    return
                contact = await self._contact(info, _CONTACT_S)
                if contact.link is None and not await self._is_gone_too(info, contact):
                    self._warn(info, contact)
                    await clock.sleep(_RETRY_S)
                    continue
                if contact.link is None or await self._until_gone(info, contact.link):
                    return
            except EtcdError:  # the keep-alives tell
                await clock.sleep(_RETRY_S)

    async def _look_up(self, node_id: str) -> NodeInfo | None:
        """Return the node's presence; ``None`` if it has none, or is leaving. Raises EtcdError."""
        found = await self._read(node_id)
        return None if found is None else found[1]

    async def _read(self, node_id: str) -> tuple[KeyValue, NodeInfo] | None:
        context = self._context
        result = await context.etcd.get(requests.read_presence(context.keys, node_id))
        for kv in result.kvs:
            try:
                place = place_in(context.keys, kv)
            except StateCorruptError:  # the leader warns of it
                return None
            if isinstance(place, NodeInfo) and place.leaving is None:
                return kv, place
        return None

    async def _contact(self, info: NodeInfo, timeout_s: float) -> Contact:
        return await self._network.connect(
            info.address, info.peer_port, self._peer(info.node_id), timeout_s
        )

    def _warn(self, info: NodeInfo, contact: Contact) -> None:
        if info.node_id in self._warned:
            return
        self._warned.add(info.node_id)
        me, other = self._context.identity.name, display_name(info.node_id)
        self._context.log.warn(
            f"{me} cannot reach {other} at {info.address}:{info.peer_port} ({contact.why}): its "
            "death will be noticed by its lease only, and MASTER_ADDR there may be unreachable, too"
        )

    # -- losing one -------------------------------------------------------------------------------

    async def _until_gone(self, info: NodeInfo, link: Link) -> bool:
        """Wait until the node at the other end is gone or has said good-bye, over as many links as
        it takes; ``False`` if it is there all the same. Raises EtcdError."""
        clock = self._context.clock
        while True:
            try:
                end = await link.ended()
            finally:
                link.close()
            if end is End.GOOD_BYE:
                return True
            began_s = clock.now_s()
            contact = await self._recontact(info)
            if contact.link is None:
                is_certain = end is End.CLOSED and contact.says_gone
                after_s = clock.now_s() - began_s
                how = (
                    how_gone(self._me, contact.why, after_s)
                    if is_certain
                    else how_silent(self._me, f"{end.value}, then {contact.why}")
                )
                return await self._accuse(info, how, is_certain=is_certain)
            link = contact.link

    async def _recontact(self, info: NodeInfo) -> Contact:
        """Look for a node whose link has ended, until there is a clear answer.

        TCP sends again only after a second what is lost of an attempt, so there are several.
        """
        clock = self._context.clock
        until_s = clock.now_s() + _RECONTACT_S
        tries = [
            asyncio.ensure_future(self._try(info, begins_s, until_s))
            for begins_s in (clock.now_s() + number * _NEXT_TRY_S for number in range(_TRIES))
        ]
        told = Contact(Answer.UNREACHABLE)
        try:
            for one in asyncio.as_completed(tries):
                told = await one
                if told.link is not None or told.says_gone:
                    break
            return told
        finally:
            for each in tries:
                await _end(each)
                link = None if each.cancelled() else each.result().link
                if link is not None and link is not told.link:
                    link.close()

    async def _try(self, info: NodeInfo, begins_s: float, until_s: float) -> Contact:
        """Ask it at that time, and, as soon as there is an answer that tells nothing, again."""
        clock = self._context.clock
        await clock.sleep(begins_s - clock.now_s())
        while True:
            contact = await self._contact(info, max(_BETWEEN_TRIES_S, until_s - clock.now_s()))
            if contact.link is not None or contact.says_gone or clock.now_s() >= until_s:
                return contact
            await clock.sleep(_BETWEEN_TRIES_S)

    async def _is_gone_too(self, info: NodeInfo, contact: Contact) -> bool:
        """Ask a node, after others of this world were found to be gone, that was never reached:
        all processes of a host may have ended. Raises EtcdError."""
        if not self._deaths or contact.answer is Answer.MUTE:
            return False
        gone = contact.says_gone
        how = how_gone(self._me, contact.why) if gone else how_silent(self._me, contact.why)
        return await self._accuse(info, how, is_certain=False)

    async def _accuse(self, info: NodeInfo, how: str, *, is_certain: bool) -> bool:
        """Say how the node was lost; ``False`` if its presence is not what it was, or if this node
        has to keep silent. Raises EtcdError."""
        context, clock = self._context, self._context.clock
        if not is_certain and not context.settings.peer_silence_s:
            return False
        now_s = clock.now_s()
        quiet_until_s = self._mistakes.quiet_until_s(info.node_id, now_s)
        if not is_certain:
            quiet_until_s = max(quiet_until_s, context.session.in_contact_since_s() + _SETTLED_S)
        session = context.session.lease_id
        if now_s < quiet_until_s or not session:
            await clock.sleep(max(_ANSWER_S, quiet_until_s - now_s))
            return False
        found = await self._read(info.node_id)
        if found is None or found[1].peer_port != info.peer_port:
            return found is None
        accusation = Accusation(self._me, how, is_certain)
        txn = requests.accuse(context.keys, info.node_id, found[0], accusation, session)
        try:
            result = await context.etcd.txn(txn, repeatable=True)
        except LeaseNotFoundError:
            context.session.lost(session)
            return False
        if not result.succeeded:
            return False
        context.log.say(f"{display_name(info.node_id)}: {how}")
        self._deaths += 1
        self._made[info.node_id] = result.revision
        self._doubt(info.node_id)
        return True

    def _doubt(self, node_id: str) -> None:
        """Have a look later whether a node without presence has put it back, once."""
        if node_id not in self._looked_for:
            self._looked_for.add(node_id)
            self._doubts[node_id] = self._context.clock.now_s() + _ANSWER_S
            self._context.wakeup.notify()

    async def _are_back(self) -> bool:
        """Look whether nodes that had no presence are there again, when it is time to."""
        now_s = self._context.clock.now_s()
        back = False
        for node_id in [node for node, at_s in self._doubts.items() if at_s <= now_s]:
            del self._doubts[node_id]
            try:
                found = await self._look_up(node_id)
            except EtcdError:
                self._doubts[node_id] = self._context.clock.now_s() + _RETRY_S
                continue
            if found is not None:
                back = True
                if self._made.pop(node_id, None) is not None:
                    self._deaths -= 1
                    self._mistakes.note(node_id, self._context.clock.now_s())
        return back

    async def _withdraw(self) -> None:
        """Delete what this node has said of members of an earlier world: nobody reads it now."""
        context = self._context
        while self._made and self._member.phase is Phase.MEMBER:
            node_id, revision = next(iter(self._made.items()))
            try:
                await context.etcd.txn(
                    requests.withdraw_accusation(context.keys, node_id, revision), repeatable=True
                )
            except EtcdError:
                return  # they go with this node's session
            del self._made[node_id]


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
