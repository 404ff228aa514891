"""Decides which nodes get the seats of the next world: as many as fit, in whole segments. Pure.

Without segments every node is one by itself, and all are of one domain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rdzv_etcd.protocol.model import NodeInfo, Round
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import WHOLE_DOMAIN

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that are in a world together."""

    nodes: tuple[NodeInfo, ...]
    place: int | None = None
    """Which segment of the world before it continues, counted by rank; ``None``: none."""
    first_rank: int = 0
    """Where that began."""

    @property
    def domain(self) -> str:
        return self.nodes[0].domain or ""


def natural_order(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which ``node2`` comes before ``node10``."""
    return tuple(
        (0, int(part), part) if part.isdecimal() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


def by_rank_key(node: NodeInfo) -> tuple[bool, tuple[tuple[int, int, str], ...]]:
    """A sort key: natural order of the rank keys, nodes without one last."""
    return node.rank_key is None, natural_order(node.rank_key or "")


def ranks_in(formed: Round | None) -> dict[str, int]:
    """Return the ranks in the world before, by node id."""
    members = () if formed is None else formed.members
    return {node_id: rank for rank, node_id in enumerate(members)}


def largest_world(
    candidates: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> int:
    """Return the size of the largest world that the candidates may form."""
    if not settings.has_segments:
        return min(len(candidates), settings.max_nodes) // settings.unit * settings.unit
    return sum(len(segment.nodes) for segment in choose(candidates, settings, formed))


def choose(
    candidates: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> list[Segment]:
    """Return the segments of the next world, those that have the best claim first.

    ``candidates`` are in order of preference: members of the world before, which is that of
    ``formed``, then others as they arrived. Within a domain, a segment that lacks members is filled
    with others of them, those of the segment that lacks most first, then with newcomers; what is
    left forms new segments.
    """
    ranks = ranks_in(formed)
    if not settings.has_segments:
        size = largest_world(candidates, settings, formed)
        return [
            Segment((node,), rank, rank or 0)
            for node in candidates[:size]
            for rank in (ranks.get(node.node_id),)
        ]
    domains = _by_domain(candidates)
    segments: list[Segment] = []
    if settings.segment_size == WHOLE_DOMAIN:
        segments += _whole_domains(domains, formed)
    else:
        for nodes in domains.values():
            segments += _cut(nodes, settings.segment_size, ranks)
    order = {node.node_id: index for index, node in enumerate(candidates)}

    def claim(segment: Segment) -> tuple[bool, int, int]:
        no_survivor = all(node.node_id not in ranks for node in segment.nodes)
        complete = max(order[node.node_id] for node in segment.nodes)
        return no_survivor, len(ranks) if segment.place is None else segment.place, complete

    chosen: list[Segment] = []
    seats = settings.max_nodes
    for segment in sorted(segments, key=claim):
        if len(segment.nodes) <= seats:
            chosen.append(segment)
            seats -= len(segment.nodes)
    return chosen


def incomplete(
    candidates: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> dict[str, tuple[int, int]]:
    """Return the domains with nodes that wait for others to make a segment whole: how many there
    are of it, and how many it needs."""
    if not settings.has_segments:
        return {}
    found = {}
    for domain, nodes in _by_domain(candidates).items():
        count, needed = len(nodes), settings.segment_size
        if needed == WHOLE_DOMAIN:
            needed = 0 if formed is None else formed.domains.get(domain, 0)
        else:
            count %= needed
        if 0 < count < needed:
            found[domain] = (count, needed)
    return found


def domains_seen(
    candidates: Sequence[NodeInfo],
    world: Sequence[NodeInfo],
    settings: JobSettings,
    formed: Round | None,
) -> dict[str, int]:
    """Return :attr:`Round.domains` of the record of that world."""
    if settings.segment_size != WHOLE_DOMAIN:
        return {}
    known = {} if formed is None else formed.domains
    here = _by_domain(candidates)
    order = dict.fromkeys((*_by_domain(world), *known, *here))
    return {domain: max(known.get(domain, 0), len(here.get(domain, ()))) for domain in order}


def _by_domain(candidates: Sequence[NodeInfo]) -> dict[str, list[NodeInfo]]:
    found: dict[str, list[NodeInfo]] = {}
    for node in candidates:
        if node.domain is not None:
            found.setdefault(node.domain, []).append(node)
    return found


def _cut(nodes: Sequence[NodeInfo], size: int, ranks: Mapping[str, int]) -> Iterator[Segment]:
    """Cut the nodes of one domain into whole segments."""
    before: dict[int, list[NodeInfo]] = {}
    newcomers: list[NodeInfo] = []
    for node in nodes:
        rank = ranks.get(node.node_id)
        (newcomers if rank is None else before.setdefault(rank // size, [])).append(node)
    places = sorted(before, key=lambda place: (-len(before[place]), place))
    whole = len(nodes) // size
    others = iter([node for place in places[whole:] for node in before[place]] + newcomers)
    for place in places[:whole]:
        stays = before[place]
        yield Segment((*stays, *islice(others, size - len(stays))), place, place * size)
    fresh = list(islice(others, max(0, whole - len(places)) * size))
    if any(node.rank_key is not None for node in fresh):
        fresh.sort(key=by_rank_key)
    for start in range(0, len(fresh), size):
        yield Segment(tuple(fresh[start : start + size]))


def _whole_domains(
    domains: Mapping[str, Sequence[NodeInfo]], formed: Round | None
) -> Iterator[Segment]:
    known = {} if formed is None else formed.domains
    first_rank: dict[str, int] = {}
    rank = 0
    for domain, count in known.items():
        if formed is None or rank >= formed.size:
            break
        first_rank[domain] = rank
        rank += count
    places = {domain: place for place, domain in enumerate(first_rank)}
    for domain, nodes in domains.items():
        if len(nodes) >= known.get(domain, 0):
            yield Segment(tuple(nodes), places.get(domain), first_rank.get(domain, 0))
