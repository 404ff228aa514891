"""What segments allow a world to be, counted from what its nodes said of their domains.

Counts by itself: it shares no function with the protocol that it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from rdzv_etcd.protocol.model import Round
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import WHOLE_DOMAIN

Domains = Mapping[str, str | None]
"""Each node's domain."""
NONE: Counter[str | None] = Counter()


def largest(
    here: Counter[str | None],
    settings: JobSettings,
    whole: Mapping[str | None, int],
    perhaps: Counter[str | None] = NONE,
) -> int:
    """Return the size of the largest world that so many nodes of each domain allow.

    ``whole``: how many a domain must have at least, if segments are whole domains; ``perhaps``: how
    many more may be there.
    """
    most, size, there = settings.max_nodes, settings.segment_size, here + perhaps
    if size == WHOLE_DOMAIN:
        sums = {0}
        for domain, count in there.items():
            counts = range(max(here[domain], whole.get(domain, 0)), count + 1)
            sums |= {other + n for other in sums for n in counts if other + n <= most}
        return max(sums)
    unit = settings.node_unit
    return min(most, sum(count // size * size for count in there.values())) // unit * unit


def has_room(
    seated: Counter[str | None],
    waiting: Counter[str | None],
    settings: JobSettings,
    whole: Mapping[str | None, int],
) -> bool:
    """Whether a whole segment waits though there are seats for it."""
    if settings.segment_size == WHOLE_DOMAIN:  # other domains may have added up to more
        left = settings.max_nodes - seated.total()
        for domain, n in waiting.items():
            needed = whole.get(domain, 0)
            if seated[domain] + n >= needed and (n if seated[domain] else needed or n) <= left:
                return True
        return False
    return largest(seated + waiting, settings, whole) > seated.total()


def blocks(record: Round, domain: Domains) -> list[tuple[str, ...]]:
    """Cut a world into what should be its segments, by rank."""
    size = record.settings.segment_size
    if size == WHOLE_DOMAIN:
        return [tuple(members) for _, members in groupby(record.members, domain.get)]
    return [record.members[at : at + size] for at in range(0, record.size, size)]


def broken(
    record: Round,
    domain: Domains,
    waiting: Counter[str | None],
    whole: Mapping[str | None, int],
) -> list[tuple[str, ...]]:
    """Return what is no whole segment of a world; ``waiting``: nodes that are not in it. A domain
    that was in a world before needs as many nodes as it had then, another one all that are there.
    """
    size, found = record.settings.segment_size, blocks(record, domain)
    if size != WHOLE_DOMAIN:
        return [
            one for one in found if len(one) != size or len({domain.get(node) for node in one}) > 1
        ]
    times = Counter(domain.get(one[0]) for one in found)
    return [
        one
        for one in found
        for name in (domain.get(one[0]),)
        if times[name] > 1
        or len(one) < whole.get(name, 0)
        or (waiting[name] and len(one) != whole.get(name, 0))
    ]


def moved(
    before: Round, record: Round, domain: Domains, waiting: Collection[str], *, keyed: bool
) -> list[str]:
    """Return the nodes that should have kept their rank, or their seat, and have not.

    A segment of which all are there stays where it was; so does a member of one that lost others,
    if its domain has nodes in their places. What stood above the new size had to move, and so did
    the segment that now has rank 0, if that had to go to a survivor. ``keyed``: a rank key decides
    the order within a segment.
    """
    size = record.settings.segment_size
    ranks = {node: rank for rank, node in enumerate(record.members)}
    old, new = blocks(before, domain), blocks(record, domain)
    had, have = (Counter(domain.get(one[0]) for one in each) for each in (old, new))
    if size == WHOLE_DOMAIN:
        shapes = [Counter((domain.get(one[0]), len(one)) for one in each) for each in (old, new)]
        same_first = before.members[0] == record.members[0]
        if shapes[0] != shapes[1] or not same_first or keyed:
            return []
        return [node for rank, node in enumerate(before.members) if ranks.get(node, rank) != rank]
    found: list[str] = []
    in_first = set(new[0]) if before.members[0] != record.members[0] else set()
    for at, block in enumerate(old):
        if at == 0 and in_first.isdisjoint(block) and in_first:
            continue  # none of it may be rank 0
        where = domain.get(block[0])
        seated = [node for node in block if node in ranks]
        intact = len(seated) == size
        if intact and len({ranks[node] // size for node in block}) > 1:
            found += block  # torn apart
        full = have[where] >= had[where]
        if (intact or full) and at < len(new) and in_first.isdisjoint(block):
            unit = size if keyed else 1
            place = {node: (at * size + index) // unit for index, node in enumerate(block)}
            found += [node for node in seated if ranks[node] // unit != place[node]]
    # Seats of a domain go to those first who were in the world before.
    fresh = {domain.get(node) for node in set(ranks) - set(before.members)}
    return found + [
        node for node in waiting if node in before.members and domain.get(node) in fresh
    ]


def in_order(record: Round, domain: Domains) -> bool:
    """Whether the segments of a first world are in the natural order of their domains."""
    numbers = [
        int((domain.get(one[0]) or "0").rpartition("-")[2]) for one in blocks(record, domain)
    ]
    return numbers == sorted(numbers)


def missing(here: Counter[str | None], whole: Mapping[str | None, int]) -> Sequence[str | None]:
    """Return the domains of the nodes that have to come for all domains to be whole."""
    return [name for name, count in whole.items() for _ in range(count - here[name])]
