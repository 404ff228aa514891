"""Assigns ranks 0..n-1, and cuts those of a large world into slices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rdzv_etcd.names import unknown_member
from rdzv_etcd.protocol.model import NodeInfo, Slices
from rdzv_etcd.protocol.segments import Segment, by_rank_key, natural_order

T = TypeVar("T")


def assign_ranks(
    segments: Sequence[Segment], previous: Mapping[str, int], heirs: Collection[str] = ()
) -> tuple[NodeInfo, ...]:
    """Order the chosen nodes by their new rank.

    ``previous`` maps node ids to ranks in the previous round; ``heirs`` are nodes that have a
    better claim to rank 0 than its members.

    Survivors keep their rank if it still exists, the others move into the lowest holes, newcomers
    take the rest. So it is with the segments, where newcomers are in natural order of their
    domains, and with the nodes of each. Rank 0 goes to a survivor if there is one: scripts that
    load a checkpoint on rank 0 and broadcast it would otherwise restart from a newcomer's empty
    disk. For the same reason it goes to a node that trained the latest world, if etcd's record is
    of an older one.

    With rank keys the nodes of a segment are sorted by them in natural order, those without one
    last.
    """
    nodes = [node for segment in segments for node in segment.nodes]
    keyed = any(node.rank_key is not None for node in nodes)

    def by_key(node: NodeInfo) -> tuple[object, ...]:
        return *by_rank_key(node), previous.get(node.node_id, len(previous))

    if keyed:
        segments = [replace(each, nodes=tuple(sorted(each.nodes, key=by_key))) for each in segments]
    in_order = sorted(
        segments, key=lambda each: (natural_order(each.domain), by_rank_key(each.nodes[0]))
    )
    world = [
        list(segment.nodes) if keyed else _within(segment, previous)
        for segment in _settled(in_order, lambda segment: segment.place)
    ]
    latest = max(node.epoch_trained for node in nodes)
    _put_first(world, lambda node: node.node_id in previous, keyed)
    _put_first(world, lambda node: node.epoch_trained == latest, keyed)
    _put_first(world, lambda node: node.node_id in heirs, keyed)
    return tuple(node for segment in world for node in segment)


def _within(segment: Segment, previous: Mapping[str, int]) -> list[NodeInfo]:
    def place(node: NodeInfo) -> int | None:
        rank = previous.get(node.node_id)
        if rank is None or segment.place is None:
            return None
        offset = rank - segment.first_rank
        return offset if offset >= 0 else None  # it was in another one

    return _settled(segment.nodes, place)


def _settled(items: Sequence[T], place: Callable[[T], int | None]) -> list[T]:
    """Each keeps its place if that still exists."""
    slots: list[T | None] = [None] * len(items)
    movers: list[tuple[int, T]] = []
    newcomers: list[T] = []
    for item in items:
        before = place(item)
        if before is None:
            newcomers.append(item)
        elif before < len(items) and slots[before] is None:
            slots[before] = item
        else:
            movers.append((before, item))
    movers.sort(key=lambda mover: mover[0])
    fillers = iter([*(item for _, item in movers), *newcomers])
    return [next(fillers) if item is None else item for item in slots]


def _put_first(
    world: list[list[NodeInfo]], wanted: Callable[[NodeInfo], bool], keyed: bool
) -> None:
    """Have a node that is wanted there be rank 0, if there is any: the last one, with its segment,
    unless the first segment has one. Where the nodes of a segment are ``keyed``, their order is
    given."""
    for index in (0, *range(len(world) - 1, 0, -1)):
        segment = world[index]
        found = (
            [0] if wanted(segment[0]) else [at for at, node in enumerate(segment) if wanted(node)]
        )
        if found and (not keyed or found[0] == 0):
            segment[0], segment[found[-1]] = segment[found[-1]], segment[0]
            world[0], world[index] = segment, world[0]
            return


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
