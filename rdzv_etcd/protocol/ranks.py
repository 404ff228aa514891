"""Assigns ranks 0..n-1. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from rdzv_etcd.protocol.model import NodeInfo

_DIGITS = re.compile(r"(\d+)")


def natural_order(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which ``node2`` comes before ``node10``."""
    return tuple(
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


def assign_ranks(
    chosen: Sequence[NodeInfo], previous: Mapping[str, int], heirs: Collection[str] = ()
) -> tuple[NodeInfo, ...]:
    """Order the chosen nodes by their new rank.

    ``chosen`` is in order of preference (members of the previous round, then newcomers as they
    arrived); ``previous`` maps node ids to ranks in the previous round; ``heirs`` are nodes that
    have a better claim to rank 0 than its members.

    With rank keys: sorted by them in natural order, nodes without one last. Without: survivors keep
    their rank if it still exists, the others move into the lowest holes, newcomers take what is
    left. Rank 0 goes to a survivor if there is one: scripts that load a checkpoint on rank 0 and
    broadcast it would otherwise restart from a newcomer's empty disk. For the same reason it goes
    to one of those who trained the latest world, if etcd's record tells of an older one.
    """
    if any(node.rank_key is not None for node in chosen):
        return _by_rank_key(chosen, previous)
    size = len(chosen)
    slots: list[NodeInfo | None] = [None] * size
    movers: list[NodeInfo] = []
    newcomers: list[NodeInfo] = []
    for node in chosen:
        rank = previous.get(node.node_id)
        if rank is None:
            newcomers.append(node)
        elif rank < size:
            slots[rank] = node
        else:
            movers.append(node)
    movers.sort(key=lambda node: previous[node.node_id])
    survivors = [rank for rank, node in enumerate(slots) if node is not None]
    if slots[0] is None and not movers and survivors:
        slots[0], slots[survivors[-1]] = slots[survivors[-1]], None
    fillers = iter([*movers, *newcomers])
    world = [node if node is not None else next(fillers) for node in slots]
    latest = max(node.epoch_trained for node in world)
    if world[0].epoch_trained < latest:
        last = max(rank for rank, node in enumerate(world) if node.epoch_trained == latest)
        world[0], world[last] = world[last], world[0]
    first = next((rank for rank, node in enumerate(world) if node.node_id in heirs), 0)
    world[0], world[first] = world[first], world[0]
    return tuple(world)


def _by_rank_key(chosen: Sequence[NodeInfo], previous: Mapping[str, int]) -> tuple[NodeInfo, ...]:
    order = {node.node_id: index for index, node in enumerate(chosen)}

    def key(node: NodeInfo) -> tuple[bool, tuple[tuple[int, int, str], ...], int, int]:
        return (
            node.rank_key is None,
            natural_order(node.rank_key or ""),
            previous.get(node.node_id, len(previous)),
            order[node.node_id],
        )

    return tuple(sorted(chosen, key=key))
