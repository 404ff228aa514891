"""``rdzv-etcd drain``: asks a node to leave at a point that costs its world nothing.

The request is a key; :mod:`rdzv_etcd.protocol.draining` decides what it means. The node obeys; this
command asks, and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.acting import operator
from rdzv_etcd.cli.job_view import connected
from rdzv_etcd.cli.one_node import find, watching
from rdzv_etcd.cli.options import Seconds, Target, common, yes_option
from rdzv_etcd.cli.output import RefusedError
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.api import Etcd, Event, EventKind
from rdzv_etcd.node.draining import request_drain
from rdzv_etcd.protocol.codec import decode_change, decode_key
from rdzv_etcd.protocol.draining import why_drained
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Control, Drain, NodeInfo, Round, reason_to_leave
from rdzv_etcd.protocol.requests import count_nodes, read_control, read_presence, read_slice
from rdzv_etcd.protocol.views import control_from, place_in, slice_from
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

_BEHIND_S = 2.0
"""How far behind a read the watch is at most: etcd sends what is new within milliseconds."""


class Fate(Enum):
    """What became of a node that is to leave."""

    ASKED = "is asked to leave"
    LEFT = "has left"
    GONE = "has gone, and no world waits for it"
    LOST = "was lost before it had left"
    OPEN = "has not left yet; what it was asked stands"


@dataclass(frozen=True, slots=True)
class Farewell:
    """What a node, or the leader, has said of its end."""

    left: str | None = None
    """Why it left."""
    lost: str | None = None
    """How it was lost."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node as it was read."""

    control: Control
    info: NodeInfo | None
    """``None``: it is not there."""
    is_member: bool


@click.command()
@click.argument("job")
@click.argument("node")
@click.option(
    "--reason", default="no reason given", help="Reason, shown to the node and to the others."
)
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=Seconds(shortest=0.1),
    help="Wait up to SECONDS for it to leave; by default, only record the request.",
)
@yes_option
@common
def drain(
    *,
    job: str,
    node: str,
    reason: str,
    wait_s: float | None,
    yes: bool,
    target: Target,
    as_json: bool,
) -> int:
    """Ask NODE of JOB to leave gracefully, at a point that costs the others no work.

    NODE is a host name as `status` shows it, or a whole node id. An agent of torchrun leaves within
    a second or two, a program on the library at its next commit point. The request cannot be taken
    back, and stands until the node has heard of it, for a day at most.

    \b
    Exit code: 0 it is asked (with --wait: it has left), 1 it is not (with --wait: it has not, or
    was lost), 3 etcd cannot be asked.
    """
    settings = target.settings(job)
    asked = _Asked(settings, as_json)
    fate, how = asyncio.run(asked.ask(node, reason, wait_s, yes))
    if as_json:
        fields = {
            "job": settings.job_id,
            "node": asked.node_id,
            "by": asked.drain.by,
            "reason": asked.drain.reason,
            "fate": fate.name.lower(),
        }
        output.show_json("drain", fields)
    elif fate is not Fate.ASKED:
        output.say(f"{asked.node_id} {fate.value}{f': {shown(how)}' if how else ''}")
    return output.DONE if fate in (Fate.ASKED, Fate.LEFT, Fate.GONE) else output.NOT_DONE


class _Asked:
    """One request, from the question to what became of it."""

    def __init__(self, settings: Settings, as_json: bool) -> None:
        self._settings = settings
        self._keys = JobKeys(settings.prefix, settings.job_id)
        self._as_json = as_json
        self._was_asked = False
        self.node_id = ""
        self.drain = Drain("", "")
        """What stands: an earlier request, if there was one."""

    async def ask(
        self, node: str, reason: str, wait_s: float | None, yes: bool
    ) -> tuple[Fate, str]:
        """Ask, and wait if that is wanted. Raises RefusedError, EtcdError."""
        async with connected(self._settings) as etcd:
            self.node_id = await find(etcd, self._keys, node)
            seen = await self._read(etcd)
            count = (await etcd.get(count_nodes(self._keys))).count
            follows = what_follows(seen.control, seen.info, count, is_member=seen.is_member)
            self._was_asked = self.node_id in seen.control.drains
            if not self._was_asked:
                output.confirm(
                    f"ask {self.node_id} of job {self._settings.job_id!r} to leave? {follows}.",
                    yes=yes,
                )
            if wait_s is None:
                await self._put(etcd, reason, follows)
                return Fate.ASKED, ""
            async with watching(etcd, self._keys, self.node_id) as news:
                await self._put(etcd, reason, follows)
                clock = SystemClock()
                until_s = clock.now_s() + wait_s
                said, gone_at_s = Farewell(), 0.0
                while True:
                    said = farewell(self._keys, self.node_id, news.events, said)
                    news.clear()
                    seen = await self._read(etcd)
                    is_there = seen.info is not None
                    fate = judge(seen.control, said, is_there=is_there, is_member=seen.is_member)
                    if is_there and self.node_id not in seen.control.drains:
                        await self._request(etcd, reason)  # etcd has lost it
                    if fate is Fate.GONE:  # what was read may be ahead of the watch: it said more
                        gone_at_s = gone_at_s or clock.now_s()
                        goes_on = await news.more(min(until_s, gone_at_s + _BEHIND_S))
                    else:
                        gone_at_s = 0.0
                        goes_on = fate is Fate.OPEN and await news.more(until_s)
                    if not goes_on:
                        return fate, said.left or said.lost or ""

    async def _put(self, etcd: Etcd, reason: str, follows: str) -> None:
        """Put the request, unless there is one. What stands then is in :attr:`drain`."""
        if not await self._request(etcd, reason):
            raise RefusedError(f"{self.node_id} has just left, or has been found to be dead")
        seen = await self._read(etcd)
        stands = seen.control.drains.get(self.node_id)
        self.drain = stands or Drain(operator(), reason)  # gone with it, if it left at once
        if not self._as_json:
            why = why_drained(self.drain, self.node_id)
            verb = "was asked to leave before" if self._was_asked else Fate.ASKED.value
            output.say(f"{self.node_id} {verb} ({why}). {follows}")

    async def _request(self, etcd: Etcd, reason: str) -> bool:
        by, clock = operator(), SystemClock()
        return await request_drain(etcd, self._keys, clock, self.node_id, reason, by=by)

    async def _read(self, etcd: Etcd) -> _Seen:
        keys = self._keys
        control = control_from(keys, await etcd.get(read_control(keys)))
        info = None
        for kv in (await etcd.get(read_presence(keys, self.node_id))).kvs:
            try:
                place = place_in(keys, kv)
            except StateCorruptError as error:
                raise RefusedError(f"{self.node_id} is no node: {error}") from None
            if isinstance(place, NodeInfo) and place.leaving is None:
                info = place
        return _Seen(control, info, await self._is_member(etcd, control.formed))

    async def _is_member(self, etcd: Etcd, formed: Round | None) -> bool:
        if formed is None or formed.slices is None:
            return formed is not None and self.node_id in formed.members
        request = read_slice(self._keys, formed, formed.slices, self.node_id)
        part = slice_from(formed, self.node_id, await etcd.get(request))
        return part is None or self.node_id in part.ranks


def what_follows(control: Control, info: NodeInfo | None, count: int, *, is_member: bool) -> str:
    """Say what a node of so many will do when it is asked, and what the others will; pure."""
    formed = control.formed
    if control.closure is not None:
        return "The job is closed: it leaves anyway"
    works = is_member and formed is not None and info is not None
    if not works or info is None or formed is None or info.arrived_for > formed.number:
        return "It is at work in no world, and leaves at once"
    text = (
        "torchrun's agent stops its workers and leaves at once, a program on the library at its "
        "next commit point; the others go on without it"
    )
    short = formed.settings.min_nodes - (count - 1)
    if short <= 0:
        return text
    return f"{text} as soon as there are {short} more: the job needs {formed.settings.min_nodes}"


def farewell(keys: JobKeys, node_id: str, events: Iterable[Event], before: Farewell) -> Farewell:
    """Find in events what is said of the node's end: in its presence, or in a change; pure."""
    said = before
    for event in events:
        if event.kind is not EventKind.PUT:
            continue
        try:
            if event.kv.key == keys.node(node_id):
                place = place_in(keys, event.kv)
                if isinstance(place, NodeInfo):
                    said = Farewell(left=place.leaving)  # None: it is there, again
            elif event.kv.key == keys.change:
                how = decode_key(decode_change, event.kv).lost.get(node_id)
                if how is not None and said.left is None:
                    reason = reason_to_leave(how)
                    said = Farewell(reason, how if reason is None else None)
        except StateCorruptError:
            continue  # whoever wrote that said nothing
    return said


def judge(control: Control, said: Farewell, *, is_there: bool, is_member: bool) -> Fate:
    """Say what became of a node that is to leave; pure."""
    if said.left is not None:
        return Fate.LEFT
    if said.lost is not None:
        return Fate.LOST
    if is_there:
        return Fate.OPEN
    # A member whose presence is gone: the leader will say how.
    waited_for = is_member and control.formed is not None and control.open_change is None
    return Fate.OPEN if waited_for else Fate.GONE
