"""``init_method="etcd3://host:2379,host2:2379/my-job?nodes=4&lease_ttl=5"``: for plain scripts.

After ``import rdzv_etcd.torch``, torch's ``init_process_group("gloo", init_method=…)`` forms the
process group through etcd. ``rank`` and ``world_size`` may be given to torch, as for its other
methods; otherwise the group assigns ranks, and ``nodes`` gives their number, or ``nodes=2:4`` the
fewest and the most. Every other name in the query is an option of the torch plugin, or
``local_addr``.

This node is in the job until the process ends: with the same URL, a second
``init_process_group`` in the process, after ``destroy_process_group``, joins the next world.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout

from rdzv_etcd import Group, connect
from rdzv_etcd.errors import MisuseError, SettingsError
from rdzv_etcd.text import shown
from rdzv_etcd.torch.process_group import open_store

SCHEME = "etcd3"

_NOT_TEXT = {"job", "data", "epoch_floor", "etcd", "gate"}
"""Arguments of :func:`rdzv_etcd.connect` that a URL cannot give."""

_DIGITS = 9
"""No number of nodes has more."""

_groups: dict[str, Group] = {}
"""By URL: torch knows the store, but nothing that ends when a process group does."""
_lock = threading.Lock()


def rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: object
) -> Iterator[tuple[Store, int, int]]:
    """torch's rendezvous handler for ``etcd3://``: yields the world's store, the rank and the size.

    Blocks like :func:`rdzv_etcd.connect` and :meth:`rdzv_etcd.Group.join`, the latter for at most
    ``timeout``; raises what they raise.
    """
    with _lock:
        group = _groups.get(url)
        if group is None or group.has_left:
            group = _groups[url] = _connect(url)
    world = group.join(timeout.total_seconds())
    rank = _query(url).get("rank")
    if rank is not None and int(rank) != world.rank:
        raise MisuseError(
            f"rank {rank} of job {group.job!r} became rank {world.rank}: the ranks given to the "
            f"processes are not 0 to {world.size - 1}, each once"
        )
    yield open_store(world, timeout), world.rank, world.size


def _connect(url: str) -> Group:
    parts = urlsplit(url)
    job = unquote(parts.path.removeprefix("/"))
    if not parts.netloc or not job or "/" in job:
        raise SettingsError(
            f"init_method is {shown(url, 300)!r}; it must be like "
            "'etcd3://etcd-host:2379/my-job?nodes=4'"
        )
    options: dict[str, Any] = _query(url)
    rank, size = options.pop("rank", None), options.pop("world_size", None)
    nodes = options.pop("nodes", size)
    if wrong := sorted(_NOT_TEXT & options.keys()):
        raise SettingsError(f"{wrong[0]}= cannot be given in init_method")
    if nodes is None:
        raise SettingsError(
            f"init_method is {shown(url, 300)!r} and no world_size was given: give the number of "
            "nodes, ?nodes=4, or the fewest and the most, ?nodes=2:4"
        )
    fewest, _, most = nodes.partition(":")
    if size is not None and {fewest, most or fewest} != {size}:
        raise SettingsError(f"nodes={nodes} and world_size={size} contradict each other")
    limits = _whole(fewest), _whole(most or fewest)
    if rank is not None:
        if size is None:
            raise SettingsError(f"rank {shown(rank, 100)} was given, but no world_size")
        if not rank.isdecimal() or len(rank) > _DIGITS or int(rank) >= limits[1]:
            raise SettingsError(
                f"rank is {shown(rank, 100)!r}; with world_size={size} it must be a number from 0 "
                f"to {limits[1] - 1}"
            )
        options["rank_key"] = f"value:{rank}"
    return connect(parts.netloc, job=job, nodes=limits, **options)


def _query(url: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        pairs = []
        if urlsplit(url).query:
            raise SettingsError(
                f"init_method is {shown(url, 300)!r}; after the '?' there must be options like "
                "nodes=4, with '&' between them"
            ) from None
    query: dict[str, str] = {}
    for name, value in pairs:
        if name in query:
            raise SettingsError(f"init_method: {shown(name, 100)}= is given twice")
        query[name] = value
    return query


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > _DIGITS:
        raise SettingsError(f"nodes={shown(text, 100)}: must be a number, such as 4, or 2:4")
    return int(text)
