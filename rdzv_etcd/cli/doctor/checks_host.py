"""Checks of this host and of this Python. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rdzv_etcd.cli.doctor.checks_etcd import numbers_of
from rdzv_etcd.cli.doctor.facts import Check, Facts, Finding, fail, ok, warn
from rdzv_etcd.settings.hosts import is_loopback_address

NEEDS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "torch": ((2, 6), None),
    "etcd3": ((0, 12, 0), (0, 13)),
    "grpcio": ((1, 49), None),
    "protobuf": ((3, 20), None),
    "tenacity": ((8, 2, 3), None),
}
"""Which versions this library takes: from the first, and before the second. As in
pyproject.toml."""


def host_name(facts: Facts) -> Iterator[Finding]:
    """gloo binds to what the host's name resolves to, and falls back to loopback."""
    host = facts.host
    if host.interfaces:
        yield ok(f"GLOO_SOCKET_IFNAME={host.interfaces}: gloo does not use this host's name")
        return
    hint = (
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface towards the other nodes, "
        "or put the name with this host's address into DNS or /etc/hosts"
    )
    if not host.addresses:
        text = f"this host's name {host.name!r} does not resolve: gloo falls back to loopback"
        yield warn(text, hint)
    elif not host.own:
        yield warn(
            f"this host's name {host.name!r} resolves to {', '.join(host.addresses)}, which is no "
            "address of this host: gloo cannot bind to it",
            hint,
        )
    elif all(map(is_loopback_address, host.own)) and facts.settings.job.max_nodes > 1:
        yield warn(
            f"this host's name {host.name!r} resolves to {', '.join(host.own)}: workers on other "
            "hosts cannot reach gloo here",
            hint,
        )
    else:
        yield ok(f"this host's name {host.name!r} resolves to {', '.join(host.own)}")


def plugin(facts: Facts) -> Iterator[Finding]:
    python = facts.python
    if python.plugin is None:
        yield fail(
            f"the backend etcd3 is not registered in {python.executable}: torchrun there would say "
            "that it is unknown",
            "pip install rdzv-etcd with that Python; a copy of its folder on PYTHONPATH is not "
            "enough",
        )
    elif python.plugin_problem:
        yield fail(
            f"the backend etcd3 is registered, but cannot be loaded: {python.plugin_problem}",
            "reinstall rdzv-etcd, and what it needs, in this Python",
        )
    else:
        yield ok(f"the backend etcd3 is registered in {python.executable}")


def versions(facts: Facts) -> Iterator[Finding]:
    good = []
    for name, (least, below) in NEEDS.items():
        version = facts.python.versions.get(name)
        numbers = numbers_of(version or "")
        wanted = ".".join(map(str, least)) + " or later"
        if below is not None:
            wanted += f", before {'.'.join(map(str, below))}"
        if version is None:
            yield fail(f"{name} is not installed in this Python", f"install {name} {wanted}")
        elif numbers < least[: len(numbers)] or (below is not None and numbers >= below):
            yield fail(f"{name} is {version}", f"install {name} {wanted}")
        else:
            good.append(f"{name} {version}")
    if good:
        yield ok(", ".join(good))


CHECKS: tuple[Check, ...] = (host_name, plugin, versions)
