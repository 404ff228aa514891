"""``rdzv-etcd doctor``: looks for what is wrong, with etcd, with a job, with this host.

Each finding is a row: check, level, text, hint. It writes no key. It asks for one lease, which
holds nothing, and gives it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import metadata

import click
from rich.text import Text

from rdzv_etcd.cli import doctor_etcd, output
from rdzv_etcd.cli.doctor_etcd import Finding, fail, ok, warn
from rdzv_etcd.cli.jobs import Job, jobs_under, read_job
from rdzv_etcd.cli.options import JobTarget, Seconds, common, nnodes_option
from rdzv_etcd.cli.report import how_it_ended, refused_with_help, report_on, some
from rdzv_etcd.clock import wait_for
from rdzv_etcd.embedded.cluster_start import cluster_state
from rdzv_etcd.embedded.port import own_addresses
from rdzv_etcd.errors import EtcdError, SettingsError, StateCorruptError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.names import display_name
from rdzv_etcd.protocol.describe import wanted
from rdzv_etcd.protocol.job_state import Role
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.settings import DEFAULT_JOB_ID, JobSettings, Settings
from rdzv_etcd.settings.hosts import is_loopback_address, resolve
from rdzv_etcd.text import many

_NAMED = 4
_PEERS = 32
"""So many nodes are connected to."""
_PEER_LIMIT_S = 2.0
_JOBS_BESIDE = 200
"""Jobs of which the ids are compared with the one that was asked for, one small read each."""
_ALIKE = 0.8
"""One letter of five may be another."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.argument("job", required=False)
@nnodes_option
@click.option(
    "--listen",
    "listen_s",
    type=Seconds(shortest=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Also keep an idle connection open this long; 30 reveals a limit on pings.",
)
@common
def doctor(*, job: str | None, nnodes: str, listen_s: float, target: JobTarget) -> int:
    """Diagnose why a job or this node does not work; run it with an agent's own options.

    Checks etcd, the way to it, what this user may do there, the job and its nodes, this host and
    this Python. Writes no key; requests one lease, and revokes it.

    \b
    Exit code: 0 no failure was found (but perhaps warnings), 1 at least one failure.
    """
    settings = target.settings(job or target.job_id, nnodes)
    if listen_s:
        output.warn(f"keeping an idle connection open for {output.duration(listen_s)}")
    is_about_a_job = bool(job or target.job_id or nnodes)
    found = asyncio.run(_examine(settings, is_about_a_job, nnodes, listen_s))
    count = Counter(finding.level for finding in found)
    if target.as_json:
        findings = [finding._asdict() | {"hint": finding.hint or None} for finding in found]
        levels = {level: count[level] for level in _STYLES}
        output.show_json("doctor", {"findings": findings, "count": levels})
    else:
        console = output.console()
        for finding in found:
            label = Text(f"{finding.level:<5} ", _STYLES[finding.level])
            console.print(Text.assemble(label, output.line(finding.text)), soft_wrap=True)
            if finding.hint:
                console.print(output.line(f"      -> {finding.hint}"), soft_wrap=True)
        failures, warnings = many(count["fail"], "failure"), many(count["warn"], "warning")
        output.print_line(f"{failures}, {warnings}", "bold")
    return output.FAILED if count["fail"] else output.DONE


async def _examine(
    settings: Settings, is_about_a_job: bool, nnodes: str, listen_s: float
) -> list[Finding]:
    endpoints = settings.connection.endpoints
    rows = await asyncio.gather(*(doctor_etcd.examine_endpoint(settings, it) for it in endpoints))
    found = [row for of_one in rows for row in of_one]
    of_job: list[Finding] = []
    if is_about_a_job and settings.job_id == DEFAULT_JOB_ID:
        text = (
            f"--rdzv-id is {settings.job_id!r}, torchrun's default: every job on this etcd that is "
            "started without an id is the same job"
        )
        of_job.append(warn("job.default_id", text, "give each job its own id with --rdzv-id"))
    if any(row.check == "etcd.endpoints" and row.level == "ok" for row in found):
        client = EtcdClient(settings.connection)
        keys = JobKeys(settings.prefix, settings.job_id)
        try:
            may_read, rights = await doctor_etcd.examine_rights(
                client, settings, is_about_a_job=is_about_a_job
            )
            found += rights
            if is_about_a_job and may_read:
                counts_hosts = settings.in_process  # and the job counts workers
                mine = settings.job if nnodes and not counts_hosts else None
                of_job += await _examine_job(client, keys, mine)
            if listen_s and may_read:
                found.append(await doctor_etcd.listen(client, keys, listen_s))
        finally:
            await client.close()
    if settings.embeds_cluster:
        found.append(await asyncio.to_thread(_examine_cluster, settings))
    host = await asyncio.to_thread(_examine_host_name, settings.job.max_nodes)
    return [*found, *of_job, host, _examine_plugin()]


def _examine_cluster(settings: Settings) -> Finding:
    """Ask the supervisors of an embedded cluster. Blocks for seconds if hosts are silent."""
    try:
        state = cluster_state(settings.connection)
    except SettingsError as error:
        return fail("etcd.members", str(error))
    if not state.missing:
        return ok("etcd.members", str(state))
    level = warn if len(state.members) > len(state.hosts) // 2 else fail
    hint = doctor_etcd.secret_hint("; ".join(it.why for it in state.refused.values()), settings)
    return level("etcd.members", str(state), hint or "start a node on each of these hosts")


# --- the job --------------------------------------------------------------------------------------


async def _examine_job(etcd: Etcd, keys: JobKeys, mine: JobSettings | None) -> list[Finding]:
    """``mine``: what a node started here would have, if that was given."""
    try:
        job = await read_job(etcd, keys, closely=True)
    except (EtcdError, StateCorruptError) as error:
        return [fail("job.is_there", f"the job cannot be read: {error}")]
    # If nodes are missing, they may be looking elsewhere.
    similar = [] if job.control.formed else await _also_waiting(etcd, keys)
    return [
        *_presence_findings(job, similar),
        *_settings_findings(job, mine),
        *_node_findings(job),
        *_address_findings(job),
        *await _reach_findings(job),
    ]


def _presence_findings(job: Job, similar: list[str]) -> Iterator[Finding]:
    """Look for a wrong id."""
    if not job.is_empty:
        report = report_on(job)
        yield ok("job.is_there", f"job {job.job!r} {report.state.value}: {report.headline}")
        if job.control.closure is not None and not job.control.closure.succeeded:
            text = f"the last run {how_it_ended(job)}"
            yield warn("job.last_end", text, "see the logs of that node")
    else:
        text = f"no job {job.job!r} under {job.keys.prefix}: no node has joined"
        yield warn("job.is_there", text, "do the agents use this id, etcd_prefix and etcd?")
    if similar:
        text = f"a job with a similar id is also waiting for nodes: {', '.join(map(repr, similar))}"
        hint = "if it is the same one, start all nodes with the same --rdzv-id"
        yield warn("job.also_waits", text, hint)


async def _also_waiting(etcd: Etcd, keys: JobKeys) -> list[str]:
    """Return jobs that wait for nodes and are spelled nearly like this one, as far as this user may
    read them: most may not look outside their own job."""
    with contextlib.suppress(EtcdError):
        return await _waiting_and_alike(etcd, keys)
    return []


async def _waiting_and_alike(etcd: Etcd, keys: JobKeys) -> list[str]:
    jobs, _ = await jobs_under(etcd, keys.prefix, _JOBS_BESIDE)
    others = [job for job in jobs if job != keys.job_id]
    waiting = []
    for job in get_close_matches(keys.job_id, others, cutoff=_ALIKE):
        try:
            view = await read_job(etcd, JobKeys(keys.prefix, job))
        except StateCorruptError:
            continue
        if view.control.formed is None and view.count:
            waiting.append(job)
    return waiting


def _settings_findings(job: Job, mine: JobSettings | None) -> Iterator[Finding]:
    check, theirs = "job.same_settings", job.state.settings
    if mine is None or theirs is None:
        return
    if mine == theirs:
        yield ok(check, f"this node's settings are the job's: {wanted(theirs)} nodes")
    elif job.control.closure is not None:
        yield warn(check, f"the last run had other settings: {theirs}")
    else:
        text = f"this node would be refused: it has {mine}, and the job {theirs}"
        hint = "start all nodes with the same --nnodes, node_unit and segment_size, or another id"
        yield fail(check, text, hint)


def _node_findings(job: Job) -> Iterator[Finding]:
    """Look for another job with the same id: other settings, or more nodes than seats."""
    check, state = "job.strangers", job.state
    strangers = [node.node_id for node in state.nodes if node.role is Role.STRANGER]
    if strangers:
        text = f"another job has the same id: {some(job, strangers)} started with other settings"
        yield fail(check, text, "give each job its own id with --rdzv-id")
    refused = refused_with_help(job)
    if refused is not None:
        yield warn(check, *refused)
    if state.spares:
        text = f"{many(len(state.spares), 'node')} without a seat: {some(job, state.spares)}"
        hint = "fine if these are spares; if not, another job uses the same --rdzv-id"
        yield warn(check, text, hint)
    for problem in list(state.unreadable.values())[:_NAMED]:
        yield fail(check, f"no node of this library wrote this key: {problem}", "delete the key")
    by_host: dict[str, list[str]] = {}
    hosts_of: dict[str | None, set[str]] = {}
    for node in state.nodes:
        hosts_of.setdefault(node.domain, set()).add(node.host)
    for node in state.nodes:
        if node.domain is None or len(hosts_of[node.domain]) > 1:  # else it is meant to be several
            by_host.setdefault(node.host, []).append(node.node_id)
    for host, nodes in by_host.items():
        if len(nodes) > 1 and "~" in nodes[0]:
            pids = ", ".join(node.split("~")[1] for node in nodes[:_NAMED])
            text = (
                f"{len(nodes)} agents of the job run on host {host} (pids {pids}); each is a node"
            )
            hint = (
                "stop all but one, unless one host is meant to be several nodes; set the number of "
                "workers with --nproc-per-node"
            )
            yield warn("job.launchers", text, hint)


def _address_findings(job: Job) -> Iterator[Finding]:
    """Look for a master, or any node, that others would look for on their own host."""
    check, nodes = "job.master", _infos(job)
    if len(nodes) < 2:
        return
    hint = (
        "start that node without --local-addr=127.0.0.1, with an address of etcd's host in "
        "--rdzv-endpoint that other hosts see, or with the right --local-addr"
    )
    elsewhere = [node.node_id for node in nodes if not is_loopback_address(node.address)]
    loopback = [node.node_id for node in nodes if is_loopback_address(node.address)]
    apart = elsewhere or len({display_name(node.node_id) for node in nodes}) > 1
    formed = job.control.formed
    master = "" if formed is None else f"{formed.master_address}:{formed.master_port}"
    if formed is not None and is_loopback_address(formed.master_address) and apart:
        others = some(job, elsewhere or loopback)
        text = f"the master, {master}, is a loopback address, but {others} may be on other hosts"
        yield fail(check, text, hint)
    elif loopback and apart:
        text = f"no other host can reach {some(job, loopback)}: the address is loopback"
        yield fail(check, text, hint)
    elif master:
        yield ok(check, f"the master is {master}")


async def _reach_findings(job: Job) -> list[Finding]:
    """Connect to where the nodes' neighbours watch them, as far as there are not too many."""
    check, nodes = "job.reachable", [info for info in _infos(job) if info.peer_port][:_PEERS]
    reasons = await asyncio.gather(*map(_reach, nodes))
    missed = [(node, why) for node, why in zip(nodes, reasons, strict=True) if why]
    if nodes and not missed:
        return [ok(check, f"{many(len(nodes), 'node')} can be reached from here")]
    hint = (
        "open the ports between the nodes (any port above 1024), or set --local-addr there to an "
        "address that this host reaches; without links its death is noticed by its lease"
    )
    found = []
    for node, why in missed[:_NAMED]:
        where = f"{job.names(node.node_id)} at {node.address}:{node.peer_port}"
        found.append(fail(check, f"{where} cannot be reached from here: {why}", hint))
    if len(missed) > _NAMED:
        more = many(len(missed) - _NAMED, "more node")
        found.append(fail(check, f"{more} cannot be reached from here"))
    return found


async def _reach(node: NodeInfo) -> str:
    """Connect and disconnect; return why that is impossible, if it is. A connection without a
    greeting means nothing to the node."""
    opening = asyncio.open_connection(node.address, node.peer_port)
    try:
        _, writer = await wait_for(opening, _PEER_LIMIT_S)
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()
    writer.close()
    return ""


def _infos(job: Job) -> list[NodeInfo]:
    return [presence.info for presence in job.nodes.present.values()]


# --- this host and this Python --------------------------------------------------------------------


def _examine_host_name(max_nodes: int) -> Finding:
    """gloo binds to what the host's name resolves to, or else to loopback. Blocks for look-ups."""
    check = "host.host_name"
    host, interfaces = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        return ok(check, f"GLOO_SOCKET_IFNAME={interfaces}: gloo does not use this host's name")
    addresses, own = resolve(host), own_addresses(host)
    name = f"this host's name {host!r}"
    if not addresses:
        text = f"{name} does not resolve: gloo falls back to loopback"
    elif not own:
        text = (
            f"{name} resolves to {', '.join(addresses)}, which is not an address of this host: "
            "gloo cannot bind to it"
        )
    elif all(map(is_loopback_address, own)) and max_nodes > 1:
        text = f"{name} resolves to {', '.join(own)}: other hosts' workers cannot reach gloo here"
    else:
        return ok(check, f"{name} resolves to {', '.join(own)}")
    hint = (
        "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface towards the other nodes, "
        "or put the name with this host's address into DNS or /etc/hosts"
    )
    return warn(check, text, hint)


def _examine_plugin() -> Finding:
    """Look for the backend as torch does, without importing torch."""
    check = "host.plugin"
    entries = metadata.entry_points(group="torchrun.handlers")
    found = [entry for entry in entries if entry.name == "etcd3"]
    if not found:
        text = f"the backend etcd3 is not registered in {sys.executable}, so torchrun rejects it"
        hint = (
            "pip install rdzv-etcd with that Python; a copy of its folder on PYTHONPATH is not "
            "enough"
        )
        return fail(check, text, hint)
    try:
        found[0].load()
    except Exception as error:  # noqa: BLE001 - torch also ignores a plugin that fails here
        problem = f"{type(error).__name__}: {error}"
        text = f"the backend etcd3 is registered, but cannot be loaded: {problem}"
        return fail(check, text, "reinstall rdzv-etcd and its dependencies in this Python")
    return ok(check, f"the backend etcd3 is registered in {sys.executable}")
