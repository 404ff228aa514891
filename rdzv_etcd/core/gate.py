"""Decides when a host whose nodes do not pass their gate has to cool down. Pure."""

from __future__ import annotations

from rdzv_etcd.core.model import GateFailures

FORGIVEN = 1
"""So many failures in a row are followed by no wait: a check may fail by chance."""


def must_cool_down(failures: GateFailures | None) -> bool:
    """Whether a node of that host has to wait until the memory of its failures has gone."""
    return failures is not None and failures.count > FORGIVEN


def one_more(before: GateFailures | None, how: str, node_id: str, wall_s: float) -> GateFailures:
    """What is to be remembered after one more failure."""
    return GateFailures(1 if before is None else before.count + 1, how, node_id, wall_s)
