"""Decides which nodes get the seats of the next world: as many as fit, in whole segments. Pure.

Without the option, a world is one segment.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

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
        return settings.fitting(len(candidates))
    return sum(len(segment.nodes) for segment in choose(candidates, settings, formed))


def choose(
    candidates: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> list[Segment]:
    """Return the segments of the next world.

    ``candidates`` are in order of preference: members of the world before, which is that of
    ``formed``, then others as they arrived. Segments with survivors come first. Of the others,
    those that fill most seats, and among these those that were whole first.
    """
    if not settings.has_segments:
        size = settings.fitting(len(candidates))
        return [Segment(tuple(candidates[:size]), 0)] if size else []
    ranks = ranks_in(formed)
    domains = _by_domain(candidates)
    if settings.segment_size == WHOLE_DOMAIN:
        return _whole_domains(domains, candidates, settings, formed)
    found = [
        segment
        for nodes in domains.values()
        for segment in _cut(nodes, settings.segment_size, ranks)
    ]
    return _that_fit(found, candidates, settings, ranks)


def incomplete(
    candidates: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> dict[str, tuple[int, int]]:
    """Return the domains with nodes that wait for others to make a segment whole: how many there
    are of it, and how many it needs; and those that are too large for any world: how many nodes
    they have, and how many may be in one."""
    if not settings.has_segments:
        return {}
    known = {} if formed is None else formed.domains
    found = {}
    for domain, nodes in _by_domain(candidates).items():
        count, needed = len(nodes), settings.segment_size
        if needed == WHOLE_DOMAIN:
            needed = known.get(domain, count)
            if min(count, needed) > settings.max_nodes:
                found[domain] = (count, settings.max_nodes)
        else:
            count %= needed
        if 0 < count < needed:
            found[domain] = (count, needed)
    return found


def sizes_of_domains(
    world: Sequence[NodeInfo], settings: JobSettings, formed: Round | None
) -> dict[str, int]:
    """Return :attr:`Round.domains` of the record of that world."""
    if settings.segment_size != WHOLE_DOMAIN:
        return {}
    known = {} if formed is None else formed.domains
    here = {domain: len(nodes) for domain, nodes in _by_domain(world).items()}
    return here | {domain: size for domain, size in known.items() if domain not in here}


def cannot_stay(gone: Collection[str], settings: JobSettings, formed: Round) -> set[str]:
    """Return the members of segments of which some are ``gone``, if the others make no segment,
    however many of them are there; without newcomers. Empty if that cannot be told."""
    if not settings.has_segments:
        return set()
    size, ranks = settings.segment_size, ranks_in(formed)
    ends = list(accumulate(formed.domains.values()))

    def place(rank: int) -> int:
        return bisect_right(ends, rank) if size == WHOLE_DOMAIN else rank // size

    broken = {place(ranks[node_id]) for node_id in gone if node_id in ranks}
    members = {node_id for node_id, rank in ranks.items() if place(rank) in broken}
    # Segments of one domain may be cut anew from what is left of several.
    return members if size == WHOLE_DOMAIN or len(members.difference(gone)) < size else set()


def _by_domain(candidates: Sequence[NodeInfo]) -> dict[str, list[NodeInfo]]:
    found: dict[str, list[NodeInfo]] = {}
    for node in candidates:
        if node.domain is not None:
            found.setdefault(node.domain, []).append(node)
    return found


def _that_fit(
    segments: Sequence[Segment],
    candidates: Sequence[NodeInfo],
    settings: JobSettings,
    ranks: Mapping[str, int],
) -> list[Segment]:
    """Choose among segments, those that were whole first in front."""
    order = {node.node_id: index for index, node in enumerate(candidates)}
    seats = settings.max_nodes
    chosen: list[Segment] = []
    others: list[Segment] = []
    for segment in sorted(segments, key=lambda each: max(order[it.node_id] for it in each.nodes)):
        survives = any(node.node_id in ranks for node in segment.nodes)
        if survives and len(segment.nodes) <= seats:  # together they fitted into the world before
            chosen.append(segment)
            seats -= len(segment.nodes)
        else:
            others.append(segment)
    seats = min(seats, sum(len(segment.nodes) for segment in others))
    # How many seats those from each on can fill: one bit for each number.
    fills = [1]
    for segment in reversed(others):
        fills.append((fills[-1] | fills[-1] << len(segment.nodes)) & (1 << seats + 1) - 1)
    seats = fills.pop().bit_length() - 1
    for segment in others:
        left, rest = seats - len(segment.nodes), fills.pop()
        if left >= 0 and rest >> left & 1:
            chosen.append(segment)
            seats = left
    return chosen


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
    domains: Mapping[str, Sequence[NodeInfo]],
    candidates: Sequence[NodeInfo],
    settings: JobSettings,
    formed: Round | None,
) -> list[Segment]:
    """A domain that was in a world has as many nodes as it had there; more of them if they fit as
    well."""
    known = {} if formed is None else formed.domains
    first_rank: dict[str, int] = {}
    rank = 0
    for domain, size in known.items():
        if formed is None or rank >= formed.size:
            break
        first_rank[domain] = rank
        rank += size
    places = {domain: place for place, domain in enumerate(first_rank)}
    whole = [
        Segment(tuple(nodes[: known.get(domain)]), places.get(domain), first_rank.get(domain, 0))
        for domain, nodes in domains.items()
        if len(nodes) >= known.get(domain, 0)
    ]
    chosen = _that_fit(whole, candidates, settings, ranks_in(formed))
    seats = settings.max_nodes - sum(len(segment.nodes) for segment in chosen)
    for index, segment in enumerate(chosen):
        nodes = tuple(domains[segment.domain])
        more = len(nodes) - len(segment.nodes)
        if 0 < more <= seats:
            chosen[index] = replace(segment, nodes=nodes)
            seats -= more
    return chosen
