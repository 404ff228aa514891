"""Cuts the ranks of a large world into slices, and puts them together again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rdzv_etcd.protocol.model import Slices
from rdzv_etcd.protocol.names import unknown_member


def slices_for(size: int, slice_nodes: int, edition: str) -> Slices | None:
    """Say how a world of ``size`` is published: whole up to ``slice_nodes``, else in slices.

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

    After a loss of data, a slice is missing until one of the members in it has put it back. Who is
    unknown gets a name that no node has: for the leader, a member that is absent.
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
