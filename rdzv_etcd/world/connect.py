"""The front door of the library: from a few words to a :class:`~rdzv_etcd.world.group.Group`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rdzv_etcd.arguments import whole_or_none
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import settings_from_config
from rdzv_etcd.settings.options import WITHOUT_MEANING
from rdzv_etcd.settings.parse import EPOCH_VARIABLE
from rdzv_etcd.text import named
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.observer import Observer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ConnectionOptions(TypedDict, total=False):
    """The options that say how etcd is reached, and where the job is in it: docs/options.md."""

    etcd_prefix: str
    request_timeout: float
    connect_timeout: float
    allow_plain_password: bool
    protocol: str
    ca_cert: str | Path
    cert: str | Path
    key: str | Path
    user_file: str | Path
    password_file: str | Path
    embed_secret_file: str | Path


class Options(ConnectionOptions, total=False):
    """Every option of ``--rdzv-conf``, by the same name and in the same unit: docs/options.md."""

    lease_ttl: int
    join_timeout: float
    last_call_timeout: float
    rejoin_timeout: float
    ended_ttl: int
    close_timeout: float
    keep_alive_interval: float
    keep_alive_max_attempt: int
    node_unit: int
    segment_size: int | str
    rank_key: str
    domain_key: str
    after_end: str
    orphans: str
    in_process: bool
    peer_links: bool
    peer_silence: float
    gate_command: str
    gate_timeout: float
    metrics_port: int
    history: int
    embed: bool


def connect(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    nodes: int | tuple[int, int],
    data: Mapping[str, object] | None = None,
    local_addr: str | None = None,
    epoch_floor: int = 0,
    **options: Unpack[Options],
) -> Group:
    """Connect to etcd and take part in a job; the first :meth:`~rdzv_etcd.world.group.Group.join`,
    or ``for world in group.worlds()``, makes this node wait for the others.

    ``endpoints`` is ``"host:2379"`` or a list of such addresses, with ``https://`` for TLS. ``job``
    is the id that all nodes share. ``nodes`` is the number of nodes, or the pair of the fewest and
    the most. ``data`` is a JSON object of at most 4 KiB that the other members see. ``local_addr``
    is the address at which they reach this node, if the detected one is wrong. ``epoch_floor`` is
    an epoch that the job has reached before, as a checkpoint records it. ``options`` are those of
    the torch plugin.

    User and password come from ``RDZV_ETCD_USER`` and ``RDZV_ETCD_PASSWORD``, the secret of an
    embedded etcd from ``RDZV_ETCD_EMBED_SECRET``, or from the files that the options name; nothing
    else is read from the environment, unless ``rank_key`` or ``domain_key`` names a variable.

    Blocks and raises as :class:`~rdzv_etcd.world.group.Group`, and raises
    :class:`~rdzv_etcd.errors.SettingsError` for invalid arguments.
    """
    fewest, most = _fewest_and_most(nodes)
    for name in options:
        if name in WITHOUT_MEANING:
            raise SettingsError(f"{name} is an option for torchrun only: {WITHOUT_MEANING[name]}")
    settings = settings_from_config(
        endpoint=_endpoints(endpoints),
        job_id=job,
        min_nodes=fewest,
        max_nodes=most,
        local_addr=local_addr,
        config=options,
        environ=_environ(),
        data=data,
        epoch_floor=epoch_floor,
    )
    if settings.in_process:
        raise SettingsError(
            "in_process is an option for torchrun only; in its workers call "
            "rdzv_etcd.torch.connect_worker()"
        )
    return Group(settings)


def observe(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    **options: Unpack[ConnectionOptions],
) -> Observer:
    """Look at a job from outside, without taking part: see :class:`~rdzv_etcd.Observer`.

    ``endpoints`` and ``job`` are those of :func:`connect`; ``options`` are those of its options
    that say how etcd is reached, and ``etcd_prefix``. Secrets come from the same places.
    Blocks for at most ``connect_timeout`` seconds. Raises :class:`~rdzv_etcd.errors.EtcdError`, and
    :class:`~rdzv_etcd.errors.SettingsError` for invalid arguments.
    """
    known = ConnectionOptions.__annotations__
    for name in options:
        if name not in known:
            raise SettingsError(
                f"{name} is not an option of observe(); those are {', '.join(known)}"
            )
    settings = settings_from_config(
        endpoint=_endpoints(endpoints),
        job_id=job,
        min_nodes=1,
        max_nodes=1,
        local_addr=None,
        config=options,
        environ=_environ(),
    )
    return Observer(settings)


def _environ() -> dict[str, str]:
    """What is read from the environment: secrets, and variables that options name."""
    return {name: value for name, value in os.environ.items() if name != EPOCH_VARIABLE}


def _endpoints(endpoints: object) -> str:
    several = [endpoints] if isinstance(endpoints, str) else endpoints
    if isinstance(several, Iterable) and not isinstance(several, bytes):
        texts = list(several)
        if texts and all(isinstance(text, str) and text.strip() for text in texts):
            return ",".join(texts)
    raise SettingsError(
        f"endpoints is {named(endpoints, 100)}; it must be the address of an etcd, such as "
        "'etcd-host:2379', or a list of those of its members"
    )


def _fewest_and_most(nodes: object) -> tuple[int, int]:
    pair = nodes if isinstance(nodes, tuple | list) else (nodes, nodes)
    if len(pair) == 2:
        fewest, most = map(whole_or_none, pair)
        if fewest is not None and most is not None:
            return fewest, most
    raise SettingsError(
        f"nodes is {named(nodes, 100)}; it must be a number, or a pair of the fewest and the most: "
        "whole numbers"
    )
