"""Decides what a drain means: who may stop for it, and what the node that is drained does. Pure.

A drain is a wish, not a loss: the world continues until its members come to a point at which
stopping costs them nothing. An operator puts the same key as the node itself; the node adds the
epoch of the world that it is in, so that no other world's members stop for it.
"""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.names import display_name
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Control, Drain, Nodes
from rdzv_etcd.text import shown

_REASON = 500
"""Characters of a reason that are told."""


def should_yield(member: Member, control: Control, epoch: int) -> bool:
    """Whether the members of the world of that epoch should stop at their next commit point."""
    if member.drain is not None and member.works_in(epoch):
        return True  # nobody else may know of it yet
    return any(drain.epoch == epoch for drain in control.drains.values())


def asked_to_leave(control: Control, nodes: Nodes) -> dict[str, Drain]:
    """Return whom to expect to leave, and why: nodes that are there, and members that may be back.

    A request outlives a node that died before it had heard of it.
    """
    formed, change = control.formed, control.open_change
    lost = {} if change is None else change.lost
    expected = set() if formed is None else set(formed.members) - lost.keys()
    return {
        node_id: drain
        for node_id, drain in control.drains.items()
        if node_id in nodes.present or node_id in expected
    }


def drain_to_announce(member: Member, control: Control, session: int) -> Drain | None:
    """Return the drain that this node has yet to announce to the others, if any.

    Only a member has others to announce it to: a node that is in no world just leaves.
    """
    drain = member.drain
    if drain is None or not session or member.phase is not Phase.MEMBER:
        return None
    if member.evicted or member.closure is not None:
        return None
    wanted = replace(drain, epoch=member.epoch)
    return None if control.drains.get(member.node_id) == wanted else wanted


def why_drained(drain: Drain, node_id: str) -> str:
    """Why a drained node leaves, as the others are told; whatever others wrote in it."""
    by = "" if drain.by == node_id else f" by {display_name(drain.by)}"
    return f"drained{by}: {shown(drain.reason, _REASON)}"
