"""Assigns ranks 0..n-1, and cuts those of a large world into slices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from rdzv_etcd.names import unknown_member
from rdzv_etcd.protocol.model import NodeInfo, Slices

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
    their rank if it still exists, the others move into the lowest holes, newcomers take the
    rest. Rank 0 goes to a survivor if there is one: scripts that load a checkpoint on rank 0 and
    broadcast it would otherwise restart from a newcomer's empty disk. For the same reason it goes
    to a node that trained the latest world, if etcd's record is of an older one.
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


# --- the ranks of a large world, in slices -------------------------------------------------------


def slices_for(size: int, slice_nodes: int, edition: str) -> Slices | None:
    """Decide how a world of ``size`` is published: whole up to ``slice_nodes``, else in slices.

    A slice is a quarter of that, on average: smaller ones would save a node less than its own
    requests cost, larger ones are what it mostly reads (benchmarks/NOTES.md).
    """
    if size <= slice_nodes:
        return None
    return Slices(size, -(-size // max(1, slice_nodes // 4)), edition)


def cut(members: Sequence[str], slices: Slices) -> tuple[Mapping[str, int], ...]:
    """Return the ranks by slice; a node's slice follows from its id alone."""
    ranks: list[dict[str, int]] = [{} for _ in range(slices.count)]
    for rank, node_id in enumerate(members):
        ranks[slices.index_of(node_id)][node_id] = rank
    return tuple(ranks)


def assemble(found: Iterable[Mapping[str, int]], size: int) -> tuple[tuple[str, ...], bool]:
    """Return the members by rank, and whether all are known.

    After a loss of data, a slice is missing until one of the members in it has put it back. An
    unknown member gets a name that no node has: for the leader, a member that is absent.
    """
    members: list[str | None] = [None] * size
    for ranks in found:
        for node_id, rank in ranks.items():
            if rank < size:
                members[rank] = node_id
    complete = all(node_id is not None for node_id in members)
    return tuple(
        unknown_member(rank) if node_id is None else node_id for rank, node_id in enumerate(members)
    ), complete
