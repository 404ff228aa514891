"""Every option of ``--rdzv-conf``, collected from the fields of the settings."""

from __future__ import annotations

from rdzv_etcd.settings.connection import Connection, Credentials, Tls
from rdzv_etcd.settings.definitions import JobSettings, Settings, Timing
from rdzv_etcd.settings.fields import Kind, Option, options_of

_PROTOCOL = Option(
    "protocol",
    Kind.TEXT,
    "`http`",
    "`http` or `https`; must agree with the scheme in the endpoint if it has one.",
)
_FACTORS = (
    Option(
        "keep_alive_interval",
        Kind.SECONDS,
        "5, if the next is given",
        "As in etcd-v2: `lease_ttl` = `keep_alive_interval` × `keep_alive_max_attempt`.",
    ),
    Option(
        "keep_alive_max_attempt",
        Kind.COUNT,
        "3, if the former is given",
        "See `keep_alive_interval`.",
    ),
)

OPTIONS: tuple[Option, ...] = (
    *options_of(Timing).values(),
    *_FACTORS,
    *options_of(JobSettings).values(),
    *options_of(Settings).values(),
    *options_of(Connection).values(),
    _PROTOCOL,
    *options_of(Tls).values(),
    *options_of(Credentials).values(),
)

WITHOUT_MEANING: dict[str, str] = {
    "is_host": "no node hosts the rendezvous: etcd does (with embed=1 on the endpoint's machine)",
    "store_type": "the rendezvous is kept in etcd, and the workers' store is a TCPStore",
}
"""Options of torch's c10d backend that are accepted, so that moving is one word, and why they have
no effect here."""

NAMES: dict[str, Option] = {name: option for option in OPTIONS for name in option.names}


def options_table() -> str:
    """Render the options as the markdown table that docs/options.md shows."""
    lines = [
        "| option | also accepted | value | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for option in OPTIONS:
        aliases = ", ".join(f"`{alias}`" for alias in option.aliases)
        cells = (f"`{option.name}`", aliases, option.kind.value, option.default, option.help)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
