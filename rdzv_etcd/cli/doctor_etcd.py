"""What the doctor finds out about an etcd: the way to it, its state, and this user's rights.

Each finding is a row. Version, alarms, quota and command line come from the pages that etcd 3.4 to
3.6 serves over HTTP on its client port; a page that is not served is not looked at.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import NamedTuple

from rdzv_etcd.cli.output import duration
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.embedded.request import ask, parsed
from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdTlsError,
    RdzvEtcdError,
    SettingsError,
)
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.protocol.inspect_requests import may_write
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Endpoint, Settings, Tls
from rdzv_etcd.trust import NO_TLS, without_zone

_OLDEST = (3, 4)
_SOUND = (3, 5, 6)
"""3.5.0 to 3.5.2 may corrupt data (etcd#13766), up to 3.5.4 a read-only transaction may crash it
(#14110), and 3.5.5 may corrupt data on defragmentation (#14382)."""
_NEAR_QUOTA = 0.8
_PINGS_EVERY_S = 6.0
"""As :mod:`rdzv_etcd.etcd.channel` has it."""
_FAR_S = 0.1
_PAGE_LIMIT_S = 2.0
_SHORTEST_LEASE_S = 2
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_SPACE_HINT = (
    "compact it and defragment each member (`etcdctl compact`, `etcdctl defrag --cluster`), raise "
    "--quota-backend-bytes, then run `etcdctl alarm disarm`"
)
_PINGS_HINT = "start etcd with --grpc-keepalive-min-time=5s, its default"


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    level: str
    """``ok``, ``warn`` or ``fail``."""
    text: str
    hint: str = ""
    """What to do."""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warn(check: str, text: str, hint: str = "") -> Finding:
    return Finding(check, "warn", text, hint)


def fail(check: str, text: str, hint: str = "") -> Finding:
    return Finding(check, "fail", text, hint)


async def examine_endpoint(settings: Settings, endpoint: Endpoint) -> list[Finding]:
    """Ask one endpoint by itself: another one would answer in its place."""
    only = replace(settings.connection, endpoints=(endpoint,))
    name, tls = str(only), only.tls
    try:
        client = EtcdClient(only)
        try:
            await client.connect()
            began_s = time.monotonic()
            await client.connect()
            took_s = time.monotonic() - began_s
        finally:
            await client.close()
    except RdzvEtcdError as error:
        hint = _endpoint_hint(error, settings)
        return [fail("etcd.endpoints", f"{name}: {error}", hint)]
    pages = await asyncio.to_thread(_read_pages, endpoint, tls)
    return list(_endpoint_findings(settings, name, took_s, pages))


def secret_hint(text: str, settings: Settings) -> str:
    """Return what to do if ``text`` is about the secret of an embedded etcd; else it is empty."""
    if "secret" not in text or not (settings.embed or settings.connection.secret):
        return ""
    if NO_TLS in text:
        return "run it without RDZV_ETCD_EMBED_SECRET and embed_secret_file=, if the agents do"
    return "run it with the agents' RDZV_ETCD_EMBED_SECRET or embed_secret_file="


def _endpoint_hint(error: RdzvEtcdError, settings: Settings) -> str:
    text, over_tls = str(error), settings.connection.tls is not None
    if hint := secret_hint(text, settings):
        return hint
    if "speaks http" in text or "cannot be used" in text:  # it names the cure itself
        return "" if over_tls else "for TLS see also docs/guide.md"
    if "cannot be resolved" in text:
        return "name a host in --rdzv-endpoint that this one can resolve"
    hints = {
        EtcdTlsError: "TLS: check ca_cert, cert, key, and the host name in --rdzv-endpoint",
        EtcdAuthError: "set RDZV_ETCD_USER and RDZV_ETCD_PASSWORD, or user_file= and "
        "password_file=, to a user of this etcd (`etcdctl user list`)",
        SettingsError: "see docs/options.md",
    }
    other = "check --rdzv-endpoint, that etcd is running there, and firewalls on the way"
    return next((hint for kind, hint in hints.items() if isinstance(error, kind)), other)


def _endpoint_findings(
    settings: Settings, name: str, took_s: float, pages: dict[str, str]
) -> Iterator[Finding]:
    version = _json(pages["/version"]).get("etcdserver")
    named = f"etcd {version}" if version else "an etcd"
    yield ok("etcd.endpoints", f"{name}: {named}, round trip {duration(took_s)}")

    numbers = numbers_of(str(version or ""))
    if not numbers:
        yield warn("etcd.age", f"{name} does not report its version")
    elif numbers < _OLDEST:
        text = f"{name} is etcd {version}; 3.4 is the oldest supported version"
        yield fail("etcd.age", text)
    elif (3, 5) <= numbers < _SOUND:
        text = f"{name} is etcd {version}, which has known defects (lost consistency, crashes)"
        yield warn("etcd.age", text, "upgrade it to the latest 3.5 or later")

    health = _json(pages["/health"])
    if str(health.get("health", "true")).lower() != "true":
        reason = health.get("reason") or "no reason given, as by etcd 3.4 on a NOSPACE alarm"
        yield fail("etcd.space", f"{name} reports itself unhealthy: {reason}", _SPACE_HINT)
    size = _metric(pages["/metrics"], "etcd_mvcc_db_total_size_in_bytes")
    quota = _metric(pages["/metrics"], "etcd_server_quota_backend_bytes")
    if size is not None and quota:
        used = f"{size / 2**20:.1f} MiB of {quota / 2**20:.1f} MiB ({size / quota:.0%})"
        text = f"{name}: database {used}"
        is_full = size > _NEAR_QUOTA * quota
        yield warn("etcd.space", text, _SPACE_HINT) if is_full else ok("etcd.space", text)

    limit_s = _ping_limit_s(_json(pages["/debug/vars"]).get("cmdline"))
    if limit_s is not None and limit_s > _PINGS_EVERY_S:
        text = (
            f"{name} was started with --grpc-keepalive-min-time={limit_s:g}s, and nodes ping it "
            f"every {_PINGS_EVERY_S:g} s: it will break their connections"
        )
        yield fail("etcd.pings", text, _PINGS_HINT)

    ttl_s = settings.timing.lease_ttl_s
    if took_s > max(_FAR_S, ttl_s / 20):
        hint = f"losses are noticed later; lease_ttl={ttl_s} should be at least twenty times this"
        yield warn("etcd.distance", f"{name} took {duration(took_s)} to answer", hint)


async def examine_rights(
    etcd: Etcd, settings: Settings, *, is_about_a_job: bool
) -> tuple[bool, list[Finding]]:
    """Find out what a node with these settings may do; also return whether it may read."""
    keys, prefix = JobKeys(settings.prefix, settings.job_id), settings.prefix
    read_error = await _error_of(etcd.get(keys.control.read()))
    write_error = await _error_of(etcd.txn(may_write(keys), repeatable=True))
    credentials = settings.connection.credentials
    user = "this user" if credentials is None else f"user {credentials.user!r}"
    where = keys.root.decode(errors="replace") if is_about_a_job else f"{prefix}/"
    grant = (
        f"etcdctl role grant-permission ROLE --prefix=true readwrite {prefix}/, or the right "
        "etcd_prefix= in --rdzv-conf"
    )
    check, found = "etcd.permission", []
    if isinstance(read_error, EtcdPermissionError):
        found.append(fail(check, f"{user} may not read under {where}: {read_error}", grant))
    elif read_error is not None:
        found.append(fail(check, f"the job cannot be read: {read_error}"))
    if isinstance(write_error, EtcdPermissionError):
        found.append(fail(check, f"{user} may not write under {where}: a node cannot join", grant))
    elif isinstance(write_error, EtcdNoSpaceError):
        found.append(fail(check, f"etcd accepts no more writes: {write_error}", _SPACE_HINT))
    elif write_error is not None:
        found.append(fail(check, f"a node cannot write: {write_error}"))
    found = found or [ok(check, f"{user} may read and write under {where}")]
    if not isinstance(write_error, EtcdNoSpaceError | EtcdPermissionError):
        found.append(await _examine_lease(etcd, settings.timing.lease_ttl_s))
    return read_error is None, found


async def _error_of(work: Awaitable[object]) -> EtcdError | None:
    try:
        await work
    except EtcdError as error:
        return error
    return None


async def _examine_lease(etcd: Etcd, ttl_s: int) -> Finding:
    try:
        grant = await etcd.grant(_SHORTEST_LEASE_S)
        await etcd.revoke(grant.lease_id)
    except EtcdError as error:
        return fail("etcd.lease", f"etcd grants no lease: {error}")
    shortest_s = grant.ttl_s
    if shortest_s <= ttl_s:
        text = f"shortest lease granted: {shortest_s} s; lease_ttl={ttl_s} is long enough"
        return ok("etcd.lease", text)
    text = (
        f"etcd's shortest lease is {shortest_s} s (because of its election timeout), longer "
        f"than lease_ttl={ttl_s}: a lost node is noticed that much later"
    )
    hint = f"set lease_ttl={shortest_s}, or lower etcd's --election-timeout"
    return warn("etcd.lease", text, hint)


async def listen(etcd: Etcd, keys: JobKeys, listen_s: float) -> Finding:
    """Hold an idle connection, as nodes do, and see whether it is ended."""
    etcd.watch_health.check_every(2 * listen_s)  # the connection has to be idle
    watch = etcd.watch(keys.node("doctor"), start_revision=0, mark_resumes=True)
    try:
        await watch.ready()
        began_s = time.monotonic()
        # Nobody writes that key: what comes means that the watch resumed on another connection.
        await SystemClock().wait_for(anext(aiter(watch)), listen_s)
    except TimeoutError:
        return ok("etcd.pings", f"an idle connection stayed open for {duration(listen_s)}")
    finally:
        await watch.close()
    ended_s = duration(time.monotonic() - began_s)
    text = f"an idle connection was ended after {ended_s}, by etcd or by something in between"
    hint = f"{_PINGS_HINT}; a proxy or firewall has to leave idle connections alone"
    return fail("etcd.pings", text, hint)


# --- etcd's pages ---------------------------------------------------------------------------------


def _read_pages(endpoint: Endpoint, tls: Tls | None) -> dict[str, str]:
    """Read what etcd serves over HTTP; a page that is not there is empty. Blocks for seconds."""
    paths = ("/version", "/health", "/metrics", "/debug/vars")
    return {path: _page(endpoint, tls, path) for path in paths}


def _page(endpoint: Endpoint, tls: Tls | None, path: str) -> str:
    try:
        if tls is not None:
            ca = None if tls.ca_cert is None else str(tls.ca_cert)
            context = ssl.create_default_context(cafile=ca)
            if tls.cert is not None:
                context.load_cert_chain(tls.cert, tls.key)
        connection = socket.create_connection((endpoint.host, endpoint.port), _PAGE_LIMIT_S)
        if tls is not None:
            name = without_zone(endpoint.host)
            connection = context.wrap_socket(connection, server_hostname=name)
        _, page = ask(connection, path, _PAGE_LIMIT_S)
    except (OSError, ValueError):  # a certificate's is an OSError
        return ""
    return page.decode(errors="replace")  # /health is 503 when something is wrong


def _json(text: str) -> dict[str, object]:
    try:
        page = parsed(text)
    except ValueError:
        return {}
    return page if isinstance(page, dict) else {}


def _metric(text: str, name: str) -> int | None:
    found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
    try:
        return None if found is None else int(float(found[1]))
    except (ValueError, OverflowError):
        return None


def _ping_limit_s(command: object) -> float | None:
    """Read the flag from etcd's command line, in Go's notation: ``1m30s``. One that was set in
    another way is not seen."""
    line = " ".join(map(str, command)) if isinstance(command, list) else ""
    found = re.search(
        r" --?grpc-keepalive-min-time[= ]((?:\d+(?:\.\d+)?(?:ms|h|m|s))+)(?: |$)", line
    )
    if found is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", found[1])
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``(3, 5, 30)``; empty if it has none."""
    found = re.match(r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?", version)
    return () if found is None else tuple(int(part) for part in found.groups() if part)
