"""Finds out what the checks look at: every read, look-up and connection of the doctor's.

It writes no key. It asks for one lease, which holds nothing, and gives it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import metadata

from rdzv_etcd.cli.doctor.facts import EndpointFacts, Facts, HostFacts, Pages, PythonFacts
from rdzv_etcd.cli.doctor.pages import read_pages
from rdzv_etcd.cli.job_view import JobView, entangled_with, jobs_under, places_of, read_job
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.embedded.addresses import own_addresses
from rdzv_etcd.errors import (
    EtcdError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    RdzvEtcdError,
    StateCorruptError,
)
from rdzv_etcd.etcd.api import Etcd
from rdzv_etcd.etcd.inspection import InspectingClient
from rdzv_etcd.protocol.inspect_requests import may_write
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.protocol.requests import read_control
from rdzv_etcd.settings import Endpoint, Settings
from rdzv_etcd.settings.hosts import resolve

_PAGE_LIMIT_S = 2.0
_PEER_LIMIT_S = 2.0
_PEERS = 32
"""So many nodes are connected to."""
_KEYS_ELSEWHERE = 200
_JOBS_BESIDE = 200
"""Jobs of which the ids are compared with the one that was asked for, one small read each."""
_ALIKE = 0.8
"""One letter of five may be another."""
_SHORTEST_LEASE_S = 2
_DISTRIBUTIONS = ("rdzv-etcd", "torch", "etcd3", "grpcio", "protobuf", "tenacity")


async def gather(
    settings: Settings, *, is_about_a_job: bool, nnodes: str, listen_s: float = 0.0
) -> Facts:
    """Look at everything; what cannot be found out is left as it is in :class:`Facts`.

    ``listen_s``: see whether a connection is left alone for so long.
    """
    endpoints = await asyncio.gather(
        *(_look_at(settings, endpoint) for endpoint in settings.connection.endpoints)
    )
    facts = Facts(
        settings,
        await asyncio.to_thread(this_host),
        this_python(),
        is_about_a_job,
        nnodes,
        tuple(endpoints),
    )
    if not facts.is_reached:
        return facts
    client = InspectingClient(settings.connection)
    try:
        facts = await _may(client, facts)
        if is_about_a_job and not facts.read_error:
            facts = await _job(client, facts)
        return await _listen(client, facts, listen_s)
    finally:
        await client.close()


async def _look_at(settings: Settings, endpoint: Endpoint) -> EndpointFacts:
    """Ask one endpoint by itself: others would answer in its place."""
    only = replace(settings.connection, endpoints=(endpoint,))
    name = str(only)
    try:
        client = InspectingClient(only)
    except RdzvEtcdError as error:  # its files
        return EndpointFacts(name, error)
    try:
        await client.connect()
        began_s = time.monotonic()
        await client.connect()
        took_s = time.monotonic() - began_s
    except RdzvEtcdError as error:
        return EndpointFacts(name, error)
    finally:
        await client.close()
    tls = settings.connection.tls
    pages: Pages = await asyncio.to_thread(read_pages, endpoint, tls, _PAGE_LIMIT_S)
    return EndpointFacts(name, None, took_s, pages)


async def _may(etcd: Etcd, facts: Facts) -> Facts:
    """What a node with these settings may do."""
    keys = JobKeys(facts.settings.prefix, facts.settings.job_id)
    read_error = write_error = lease_error = None
    shortest_s = None
    try:
        await etcd.get(read_control(keys))
    except EtcdError as error:
        read_error = error
    try:
        await etcd.txn(may_write(keys), repeatable=True)
    except EtcdError as error:
        write_error = error
    if not isinstance(write_error, EtcdNoSpaceError | EtcdPermissionError):
        try:
            grant = await etcd.grant(_SHORTEST_LEASE_S)
            shortest_s = grant.ttl_s
            await etcd.revoke(grant.lease_id)
        except EtcdError as error:
            lease_error = error
    return replace(
        facts,
        read_error=read_error,
        write_error=write_error,
        shortest_lease_s=shortest_s,
        lease_error=lease_error,
    )


async def _listen(etcd: Etcd, facts: Facts, listen_s: float) -> Facts:
    """Hold a quiet connection, as nodes do, and see whether etcd or somebody in between ends it."""
    if not listen_s or facts.read_error is not None:
        return facts
    keys = JobKeys(facts.settings.prefix, facts.settings.job_id)
    etcd.watch_health.check_every(2 * listen_s)  # the connection has to be quiet
    watch = etcd.watch(keys.node("doctor"), start_revision=0, tell_resumes=True)
    cut_after_s = None
    try:
        await watch.ready()
        began_s = time.monotonic()
        try:
            # Nobody writes that key: what comes tells that the watch goes on elsewhere.
            await SystemClock().wait_for(anext(aiter(watch)), listen_s)
            cut_after_s = time.monotonic() - began_s
        except TimeoutError:
            pass
    finally:
        await watch.close()
    return replace(facts, listened_s=listen_s, cut_after_s=cut_after_s)


async def _job(etcd: Etcd, facts: Facts) -> Facts:
    keys = JobKeys(facts.settings.prefix, facts.settings.job_id)
    with contextlib.suppress(EtcdError):
        facts = replace(facts, entangled=tuple(await entangled_with(etcd, keys)))
    try:
        view = await read_job(etcd, keys, closely=True)
    except (EtcdError, StateCorruptError) as error:
        return replace(facts, view_error=error)
    elsewhere: Sequence[str] = ()
    similar: Sequence[str] = ()
    if view.control.formed is None:  # whoever is missing may be looking elsewhere
        with contextlib.suppress(EtcdError):
            similar = await _waiting_too(etcd, keys)
        with contextlib.suppress(EtcdError):  # most users may not look there
            elsewhere = await places_of(etcd, keys, _KEYS_ELSEWHERE)
    return replace(
        facts,
        view=view,
        elsewhere=tuple(elsewhere),
        similar=tuple(similar),
        peers=await _peers(view),
    )


async def _waiting_too(etcd: Etcd, keys: JobKeys) -> list[str]:
    """Jobs that wait for nodes and are spelt nearly as this one. Raises EtcdError."""
    jobs, _ = await jobs_under(etcd, keys.prefix, _JOBS_BESIDE)
    others = [job for job in jobs if job != keys.job_id]
    waiting = []
    for job in get_close_matches(keys.job_id, others, cutoff=_ALIKE):
        with contextlib.suppress(StateCorruptError):
            view = await read_job(etcd, JobKeys(keys.prefix, job))
            if view.control.formed is None and view.count:
                waiting.append(job)
    return waiting


async def _peers(view: JobView) -> dict[str, str]:
    nodes = [presence.info for presence in view.nodes.present.values() if presence.info.peer_port]
    nodes = nodes[:_PEERS]
    reasons = await asyncio.gather(*map(_reach, nodes))
    return {node.node_id: why for node, why in zip(nodes, reasons, strict=True)}


async def _reach(node: NodeInfo) -> str:
    """Connect to where a node's neighbour watches it, and go again. To the node that is a stranger,
    whom it tells nothing. Returns why that is impossible, if it is."""
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(node.address, node.peer_port), _PEER_LIMIT_S
        )
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()
    except asyncio.TimeoutError:  # Python 3.10's is another one
        return "no answer in time"
    writer.close()
    return ""


def this_host() -> HostFacts:
    """Look at this host; blocks for name look-ups."""
    name = socket.gethostname()
    return HostFacts(
        name, resolve(name), own_addresses(name), os.environ.get("GLOO_SOCKET_IFNAME", "")
    )


def this_python() -> PythonFacts:
    """Look at this Python, without importing torch."""
    versions: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    found = [
        entry for entry in metadata.entry_points(group="torchrun.handlers") if entry.name == "etcd3"
    ]
    if not found:
        return PythonFacts(sys.executable, versions, None)
    try:
        found[0].load()
    except Exception as error:  # noqa: BLE001 - torch, too, goes on without whatever fails here
        return PythonFacts(
            sys.executable, versions, found[0].value, f"{type(error).__name__}: {error}"
        )
    return PythonFacts(sys.executable, versions, found[0].value)
