"""One table of every option of ``--rdzv-conf``: names, types, defaults, meaning.

The parser, the "did you mean" of its errors and docs/options.md all come from here. The
aliases are the names torch's legacy ``etcd`` and ``etcd-v2`` backends use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a value is written; the value is what the table in docs/options.md calls it."""

    SECONDS = "seconds"
    WHOLE_SECONDS = "whole seconds"
    COUNT = "whole number"
    FLAG = "0 or 1"
    FILE = "file"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting a user may give."""

    name: str
    kind: Kind
    default: str
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it may be given by, ours first."""
        return (self.name, *self.aliases)


OPTIONS: tuple[Option, ...] = (
    Option(
        "protocol",
        Kind.TEXT,
        "`http`",
        "`http` or `https`; must agree with the scheme in the endpoint if it has one.",
    ),
    Option(
        "ca_cert",
        Kind.FILE,
        "the system's roots",
        "CA certificates (PEM) that etcd's certificate is checked against.",
        ("cacert",),
    ),
    Option(
        "cert",
        Kind.FILE,
        "none",
        "Client certificate (PEM); may contain its key as well.",
        ("ssl_cert",),
    ),
    Option(
        "key",
        Kind.FILE,
        "in `cert`",
        "Key of the client certificate (PEM).",
        ("ssl_cert_key",),
    ),
    Option(
        "user_file",
        Kind.FILE,
        "`$RDZV_ETCD_USER`",
        "File that holds the etcd user's name.",
    ),
    Option(
        "password_file",
        Kind.FILE,
        "`$RDZV_ETCD_PASSWORD`",
        "File that holds the etcd user's password; read again whenever a token is renewed.",
    ),
    Option(
        "allow_plain_password",
        Kind.FLAG,
        "0",
        "Send the password over plain http to an etcd on another machine, too.",
    ),
    Option(
        "join_timeout",
        Kind.SECONDS,
        "600 (torchrun: 900)",
        "How long a node waits for `min_nodes`. torchrun always sets `timeout`; an explicit "
        "`join_timeout` beats it.",
        ("timeout",),
    ),
    Option(
        "last_call_timeout",
        Kind.SECONDS,
        "30",
        "How long a first round with `min_nodes` stays open when more nodes may come; at most "
        "`join_timeout`.",
    ),
    Option(
        "rejoin_timeout",
        Kind.SECONDS,
        "120",
        "How long a later round stays open for live members of the one before. Longer than workers "
        "take to stop, a checkpoint included.",
    ),
    Option(
        "settle",
        Kind.SECONDS,
        "0.2",
        "How long a round stays open when every live node is back already.",
    ),
    Option(
        "lease_ttl",
        Kind.WHOLE_SECONDS,
        "10",
        "A node that is silent this long is lost; at least 2.",
    ),
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
    Option(
        "heartbeat_timeout",
        Kind.SECONDS,
        "`lease_ttl` / 5",
        "How long one keep-alive waits for etcd's reply before it tries another way; at most "
        "`lease_ttl` / 3 is used.",
    ),
    Option(
        "close_timeout",
        Kind.SECONDS,
        "30",
        "Bounds closing the job and leaving it.",
    ),
    Option(
        "after_end",
        Kind.TEXT,
        "`new-run`",
        "What a node does that is started after a run of the job has ended. `new-run`: it begins a "
        "new one, and says so. `refuse`: it fails, as with etcd-v2, for `closed_ttl` seconds. "
        "`finish`: within that time it ends as the run did, with code 0 if that finished.",
    ),
    Option(
        "closed_ttl",
        Kind.WHOLE_SECONDS,
        "60",
        "How long a closed job counts as closed to nodes that are started afterwards; see "
        "`after_end`.",
    ),
    Option(
        "ended_ttl",
        Kind.WHOLE_SECONDS,
        "86400 (`embed`: `closed_ttl`)",
        "How long etcd remembers that a run ended, for nodes of it that were cut off meanwhile, "
        "and what the job's epochs count from, for its next run.",
    ),
    Option(
        "job_lease_ttl",
        Kind.WHOLE_SECONDS,
        "6 × `lease_ttl`, at least 60",
        "What a job left in etcd vanishes this long after its last node died.",
    ),
    Option(
        "request_timeout",
        Kind.SECONDS,
        "60",
        "Bounds one request to etcd with its retries.",
        ("read_timeout",),
    ),
    Option(
        "connect_timeout",
        Kind.SECONDS,
        "10",
        "Bounds the very first contact with etcd.",
    ),
    Option(
        "rank_key",
        Kind.TEXT,
        "none",
        "Ranks follow this value in natural order (`node2` before `node10`). `env:NAME`, or a "
        "bare name in capitals such as `SLURM_PROCID`, is an environment variable, which must be "
        "set; anything else, or `value:TEXT`, is the value itself.",
    ),
    Option(
        "node_unit",
        Kind.COUNT,
        "1",
        "Only worlds whose size is a multiple of this are formed.",
    ),
    Option(
        "etcd_prefix",
        Kind.TEXT,
        "`/rdzv_etcd`",
        "All keys are placed under it.",
        ("prefix",),
    ),
    Option(
        "slice_nodes",
        Kind.COUNT,
        "128",
        "The ranks of a world with more nodes than this are published in slices of a quarter of "
        "it, so that what a node reads does not grow with the job.",
    ),
    Option(
        "embed",
        Kind.FLAG,
        "0",
        "Start an etcd on the machine the endpoint names if none answers there; with the user and "
        "password given, if any.",
    ),
    Option(
        "embed_grace",
        Kind.SECONDS,
        "30",
        "An embedded etcd stops when no node has been there for this long.",
    ),
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
