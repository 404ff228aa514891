"""Checks of etcd, of the way to it, and of what this user may do there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rdzv_etcd.cli.doctor.facts import Check, EndpointFacts, Facts, Finding, fail, ok, warn
from rdzv_etcd.cli.output import duration
from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdTlsError,
    RdzvEtcdError,
    SettingsError,
)
from rdzv_etcd.protocol.keys import JobKeys

_OLDEST = (3, 4)
_SOUND = (3, 5, 6)
"""3.5.0 to 3.5.2 may corrupt data (etcd#13766), up to 3.5.4 a read-only transaction may crash it
(#14110), and 3.5.5 may corrupt data on defragmentation (#14382)."""
_NEAR_QUOTA = 0.8
_PINGS_EVERY_S = 6.0
"""As :mod:`rdzv_etcd.etcd.channels` has it."""
_FAR_S = 0.1


def endpoints(facts: Facts) -> Iterator[Finding]:
    """Unreachable, DNS, TLS, user and password: each endpoint's own error says which."""
    for endpoint in facts.endpoints:
        if endpoint.error is None:
            version = endpoint.pages.version
            named = f"etcd {version}" if version else "an etcd"
            yield ok(f"{endpoint.name}: {named}, round trip {duration(endpoint.round_trip_s)}")
        else:
            over_tls = facts.settings.connection.tls is not None
            yield fail(f"{endpoint.name}: {endpoint.error}", _hint(endpoint.error, over_tls))


def _hint(error: RdzvEtcdError, over_tls: bool) -> str:
    text = str(error)
    if "speaks http" in text:  # it says what to use
        return "" if over_tls else "for TLS see also docs/guide.md"
    if isinstance(error, EtcdTlsError):
        return "TLS: look at ca_cert, cert, key, and the host name in --rdzv-endpoint"
    if isinstance(error, EtcdAuthError):
        return (
            "set RDZV_ETCD_USER and RDZV_ETCD_PASSWORD, or user_file= and password_file=, to a "
            "user of this etcd (`etcdctl user list`)"
        )
    if isinstance(error, SettingsError):
        return "see docs/options.md"
    if "cannot be resolved" in text:
        return "name a host in --rdzv-endpoint that this one can resolve"
    return "is --rdzv-endpoint right, does etcd run there, and is there a firewall in between?"


def age(facts: Facts) -> Iterator[Finding]:
    for endpoint in _answering(facts):
        version = endpoint.pages.version
        numbers = numbers_of(version or "")
        if not numbers:
            yield warn(f"{endpoint.name} does not tell its version")
        elif numbers < _OLDEST:
            yield fail(f"{endpoint.name} is etcd {version}: 3.4 is the oldest that can be used")
        elif (3, 5) <= numbers < _SOUND:
            yield warn(
                f"{endpoint.name} is etcd {version}, which has known defects (lost consistency, "
                "crashes)",
                "upgrade it to the latest 3.5 or later",
            )


def space(facts: Facts) -> Iterator[Finding]:
    """NOSPACE, other alarms, and a quota that is nearly used up."""
    for endpoint in _answering(facts):
        pages = endpoint.pages
        if pages.alarm is not None:
            yield fail(f"{endpoint.name} calls itself not healthy: {pages.alarm}", _SPACE_HINT)
        size, quota = pages.database_bytes, pages.quota_bytes
        if size is None or not quota:
            continue
        text = f"{endpoint.name}: database {_mib(size)} of {_mib(quota)} ({size / quota:.0%})"
        yield warn(text, _SPACE_HINT) if size > _NEAR_QUOTA * quota else ok(text)


_SPACE_HINT = (
    "compact it and defragment each member (`etcdctl compact`, `etcdctl defrag --cluster`), raise "
    "--quota-backend-bytes, and then `etcdctl alarm disarm`"
)


def pings(facts: Facts) -> Iterator[Finding]:
    for endpoint in _answering(facts):
        limit_s = endpoint.pages.ping_every_s
        if limit_s is not None and limit_s > _PINGS_EVERY_S:
            yield fail(
                f"{endpoint.name} was started with --grpc-keepalive-min-time={limit_s:g}s, and "
                f"nodes ping it every {_PINGS_EVERY_S:g} s: it will break their connections",
                _PINGS_HINT,
            )
    if facts.cut_after_s is not None:
        yield fail(
            f"a quiet connection was ended after {duration(facts.cut_after_s)}, by etcd or by "
            "something in between",
            f"{_PINGS_HINT}; a proxy or firewall has to leave quiet connections alone",
        )
    elif facts.listened_s:
        yield ok(f"a quiet connection was left alone for {duration(facts.listened_s)}")


_PINGS_HINT = "start etcd with --grpc-keepalive-min-time=5s, its default"


def distance(facts: Facts) -> Iterator[Finding]:
    ttl_s = facts.settings.timing.lease_ttl_s
    for endpoint in _answering(facts):
        if endpoint.round_trip_s > max(_FAR_S, ttl_s / 20):
            yield warn(
                f"{endpoint.name} took {duration(endpoint.round_trip_s)} to answer",
                f"losses are noticed later, and lease_ttl={ttl_s} should be twenty times as long",
            )


def permission(facts: Facts) -> Iterator[Finding]:
    credentials = facts.settings.connection.credentials
    user = "this user" if credentials is None else f"user {credentials.user!r}"
    where = f"{facts.settings.prefix}/"
    if facts.is_about_a_job:
        where = JobKeys(facts.settings.prefix, facts.settings.job_id).root.decode(errors="replace")
    if not facts.is_reached:
        return
    prefix = facts.settings.prefix
    hint = (
        f"etcdctl role grant-permission ROLE --prefix=true readwrite {prefix}/, or the right "
        "etcd_prefix= in --rdzv-conf"
    )
    if isinstance(facts.read_error, EtcdPermissionError):
        yield fail(f"{user} may not read under {where}: {facts.read_error}", hint)
    elif facts.read_error is not None:
        yield fail(f"the job cannot be read: {facts.read_error}")
    if isinstance(facts.write_error, EtcdPermissionError):
        yield fail(f"{user} may not write under {where}: a node could not join", hint)
    elif isinstance(facts.write_error, EtcdNoSpaceError):
        yield fail(f"etcd takes no more writes: {facts.write_error}", _SPACE_HINT)
    elif facts.write_error is not None:
        yield fail(f"a node could not write: {facts.write_error}")
    if facts.read_error is None and facts.write_error is None:
        yield ok(f"{user} may read and write under {where}")


def lease(facts: Facts) -> Iterator[Finding]:
    ttl_s = facts.settings.timing.lease_ttl_s
    if facts.lease_error is not None:
        yield fail(f"no lease is granted: {facts.lease_error}")
    elif facts.shortest_lease_s is None:
        return
    elif facts.shortest_lease_s > ttl_s:
        yield warn(
            f"etcd's shortest lease is {facts.shortest_lease_s} s (because of its election "
            f"timeout), longer than lease_ttl={ttl_s}: a lost node is noticed that much later",
            f"set lease_ttl={facts.shortest_lease_s}, or lower etcd's --election-timeout",
        )
    else:
        yield ok(f"shortest lease granted {facts.shortest_lease_s} s; lease_ttl={ttl_s} fits")


def _answering(facts: Facts) -> Iterator[EndpointFacts]:
    return (endpoint for endpoint in facts.endpoints if endpoint.error is None)


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``(3, 5, 30)``; empty if it has none."""
    found = re.match(r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?", version)
    return () if found is None else tuple(int(part) for part in found.groups() if part)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


CHECKS: tuple[Check, ...] = (endpoints, age, space, pings, distance, permission, lease)
