"""What a distribution brings with it, as it is installed here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(*wanted: str, instead: Mapping[str, Sequence[str]] | None = None) -> set[str]:
    """Name every distribution that these requirements bring, as far as they are installed.

    ``instead``: what distributions ask for, by name, in place of those that are installed.
    """
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        key = (name, frozenset(needed.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(name)
        try:
            asked = (instead or {}).get(name) or importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # such as one for another Python
        for dependency in map(Requirement, asked):
            environments = [{"extra": extra} for extra in ("", *needed.extras)]
            if dependency.marker is None or any(map(dependency.marker.evaluate, environments)):
                waiting.append(dependency)
    return found
