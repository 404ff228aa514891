"""What torchrun takes as well, by the same names: endpoint, options, job and environment.

Knows the command line and the environment; connects to nothing.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from rdzv_etcd.cli import as_utf8
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings import DEFAULT_JOB_ID, Settings, settings_from_config
from rdzv_etcd.settings.options import NAMES
from rdzv_etcd.settings.parse import LOGIN

_REQUEST_LIMIT_S = 10.0
_OF_ONE_NODE = ("rank_key", "domain_key", "orphans", "after_end")
"""Options that do not matter for where a job is, and may name what only an agent has."""


class Seconds(click.FloatRange):
    """How long to wait; a day at most."""

    name = "seconds"

    def __init__(self, *, shortest: float) -> None:
        super().__init__(min=shortest, max=86400.0)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):  # it is neither below nor above a limit
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


@dataclass(frozen=True, slots=True)
class JobTarget:
    """Which etcd, and how to reach it; made of the common options."""

    endpoint: str
    conf: str
    job_id: str
    """The value of ``--rdzv-id``; empty if it was not given."""
    as_json: bool = False
    """Whether the result is printed as JSON."""

    def settings(self, job: str = "", nnodes: str = "") -> Settings:
        """Return the settings that an agent with these options would have, as far as they concern
        etcd and the job. Raises :class:`SettingsError`.

        The first contact, and each request, may take ten seconds at most: people wait for the
        answer.
        """
        of_job = () if nnodes else ("node_unit", "segment_size")
        config = _config(self.conf, (*_OF_ONE_NODE, *of_job))
        if "segment_size" in config:
            config["domain_key"] = "that of an agent"
        fewest, most = _nodes(nnodes or "1")
        settings = settings_from_config(
            endpoint=self.endpoint,
            job_id=job or self.job_id or DEFAULT_JOB_ID,
            min_nodes=fewest,
            max_nodes=most,
            local_addr=None,
            config=config,
            environ={name: os.environ[name] for name in LOGIN if name in os.environ},
        )
        connection = settings.connection
        connection = replace(
            connection,
            connect_timeout_s=min(connection.connect_timeout_s, _REQUEST_LIMIT_S),
            request_timeout_s=min(connection.request_timeout_s, _REQUEST_LIMIT_S),
        )
        return replace(settings, connection=connection)

    def job(self, named: str | None) -> str:
        """Return the job that a command is about: its argument, or else ``--rdzv-id``."""
        job = named or self.job_id
        if not job:
            raise SettingsError("name a job: as an argument, with --rdzv-id or in PET_RDZV_ID")
        return job


def common(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that all of them have; it gets a ``target``."""

    @functools.wraps(command)
    def with_target(*, endpoint: str, conf: str, job_id: str, as_json: bool, **given: Any) -> int:
        endpoint, conf, job_id = map(as_utf8, (endpoint, conf, job_id))  # from the environment
        return command(target=JobTarget(endpoint, conf, job_id, as_json), **given)

    for option in reversed(_COMMON):
        with_target = option(with_target)
    return with_target


_COMMON = (
    click.option(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        "--endpoint",
        "endpoint",
        envvar="PET_RDZV_ENDPOINT",
        default="",
        metavar="HOST:PORT[,...]",
        help="etcd's client addresses, as torchrun takes them.  [env: PET_RDZV_ENDPOINT; default: "
        "localhost:2379]",
    ),
    click.option(
        "--rdzv-conf",
        "--rdzv_conf",
        "--conf",
        "conf",
        envvar="PET_RDZV_CONF",
        default="",
        metavar="NAME=VALUE[,...]",
        help="Options as torchrun takes them: TLS files, user_file, etcd_prefix, …  [env: "
        "PET_RDZV_CONF]",
    ),
    click.option(
        "--rdzv-id",
        "--rdzv_id",
        "job_id",
        envvar="PET_RDZV_ID",
        default="",
        metavar="ID",
        help="Job id, if not given as an argument.  [env: PET_RDZV_ID]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON: see docs/cli.md."),
)

yes_option = click.option(
    "--yes", "-y", is_flag=True, help="Skip the confirmation; required without a terminal."
)

nnodes_option = click.option(
    "--nnodes",
    envvar="PET_NNODES",
    default="",
    metavar="MIN[:MAX]",
    help="The agents' --nnodes, to compare it with the job's settings.  [env: PET_NNODES]",
)


def _nodes(text: str) -> tuple[int, int]:
    lowest, _, highest = text.partition(":")
    try:
        return int(lowest), int(highest or lowest)
    except ValueError:
        raise SettingsError(f"--nnodes={text[:50]!r} is not a number, or MIN:MAX") from None


def _config(text: str, without: Sequence[str]) -> dict[str, object]:
    """Split it as torchrun does, and leave some options out."""
    config: dict[str, object] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if not name or not value:
            raise SettingsError(f"--rdzv-conf: {entry[:80]!r} is not NAME=VALUE")
        known = NAMES.get(name)
        if known is None or known.name not in without:
            config[name] = value
    return config
