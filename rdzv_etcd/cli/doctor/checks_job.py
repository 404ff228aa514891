"""Checks of the job: whether it is where it is looked for, and whether its nodes fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rdzv_etcd.cli.doctor.facts import Check, Facts, Finding, fail, ok, warn
from rdzv_etcd.cli.job_view import JobView
from rdzv_etcd.cli.report import closed_text, refused_with_help, report_on, some
from rdzv_etcd.protocol.job_state import settings_of
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.protocol.names import display_name
from rdzv_etcd.protocol.wait_text import needed
from rdzv_etcd.settings import is_default_job_id
from rdzv_etcd.settings.hosts import is_loopback_address

_NAMED = 4


def default_id(facts: Facts) -> Iterator[Finding]:
    if facts.is_about_a_job and is_default_job_id(facts.settings.job_id):
        yield warn(
            f"--rdzv-id is {facts.settings.job_id!r}, torchrun's default: every job on this etcd "
            "that is started without an id is the same job",
            "give each job an id of its own with --rdzv-id",
        )


def is_there(facts: Facts) -> Iterator[Finding]:
    """A wrong prefix, or a wrong id."""
    view = facts.view
    if facts.view_error is not None:
        yield fail(f"the job cannot be read: {facts.view_error}")
    if view is None:
        return
    if not view.is_empty:
        report = report_on(view)
        yield ok(f"job {view.job!r} {report.state.value}: {report.headline}")
        return
    if facts.elsewhere:
        yield fail(
            f"there is no job {view.job!r} under {view.keys.prefix}, but one under "
            f"{', '.join(facts.elsewhere[:_NAMED])}",
            f"add etcd_prefix={facts.elsewhere[0]} to --rdzv-conf, here or there",
        )
    else:
        yield warn(
            f"there is no job {view.job!r} under {view.keys.prefix}: no node has arrived",
            "is the id the agents', and do they name this etcd?",
        )


def entangled(facts: Facts) -> Iterator[Finding]:
    """A prefix below the keys of a job."""
    for text in facts.entangled:
        yield warn(
            f"two jobs' keys are mixed: {text}",
            "give them prefixes (etcd_prefix) of which none is below a job of the other",
        )


def also_waits(facts: Facts) -> Iterator[Finding]:
    """Nodes of one job that cannot find each other: under another prefix, or by another id."""
    view = facts.view
    if view is None or view.control.formed is not None:
        return
    if facts.elsewhere and not view.is_empty:
        yield warn(
            f"there is a job {view.job!r} under {', '.join(facts.elsewhere[:_NAMED])}, too",
            "if it is the same one, start all nodes with the same etcd_prefix in --rdzv-conf",
        )
    if facts.similar:
        yield warn(
            f"a job of a similar id waits for nodes, too: {', '.join(map(repr, facts.similar))}",
            "if it is the same one, start all nodes with the same --rdzv-id",
        )


def same_settings(facts: Facts) -> Iterator[Finding]:
    view = facts.view
    if view is None or not facts.nnodes:
        return
    theirs = settings_of(view.control, view.nodes)
    if theirs is None:
        return
    mine = facts.settings.job
    if mine == theirs:
        yield ok(f"--nnodes={facts.nnodes} agrees with the job's {needed(theirs)}")
        return
    closed = view.control.closure is not None
    text = f"this node would be refused: it has {mine}, and the job {theirs}"
    hint = "start all nodes with the same --nnodes and node_unit, or give the new job another id"
    yield warn(f"the last run had other settings: {theirs}") if closed else fail(text, hint)


def strangers(facts: Facts) -> Iterator[Finding]:
    """Somebody else's job with the same id: nodes with other settings, or more than have seats."""
    view = facts.view
    if view is None:
        return
    report = report_on(view)
    others = [row.node_id for row in report.rows if row.state == "stranger"]
    if others:
        yield fail(
            f"nodes with other settings are there: {some(others)}: another job has the same id",
            "give each job an id of its own with --rdzv-id",
        )
    refused = refused_with_help(view)
    if refused is not None:
        yield warn(*refused)
    spares = [row.node_id for row in report.rows if row.state == "spare"]
    if spares:
        yield warn(
            f"{len(spares)} more nodes than there are seats: {some(spares)}",
            "spares are meant to be so; if not, another job has the same --rdzv-id",
        )
    corrupt = [row for row in report.rows if row.state == "corrupt"]
    for row in corrupt[:_NAMED]:
        yield fail(f"a key that no node has written: {row.why}", "delete the key")


def master(facts: Facts) -> Iterator[Finding]:
    """A master, or any node, that others would look for on their own host."""
    view = facts.view
    nodes = _nodes(view)
    if view is None or len(nodes) < 2:
        return
    elsewhere = [node for node in nodes if not is_loopback_address(node.address)]
    loopback = [node for node in nodes if is_loopback_address(node.address)]
    apart = elsewhere or len({display_name(node.node_id) for node in nodes}) > 1
    formed = view.control.formed
    if formed is not None and is_loopback_address(formed.master_address) and apart:
        yield fail(
            f"master is {formed.master_address}:{formed.master_port}, a loopback address, but not "
            f"all nodes are on one host ({some([node.node_id for node in elsewhere or nodes])})",
            _LOCAL_ADDR,
        )
    elif loopback and apart:
        names = some([node.node_id for node in loopback])
        yield fail(f"{names} can be reached by no other host: the address is loopback", _LOCAL_ADDR)
    elif formed is not None:
        yield ok(f"master is {formed.master_address}:{formed.master_port}")


_LOCAL_ADDR = (
    "start that node without --local-addr=127.0.0.1, with --rdzv-endpoint naming etcd's host by an "
    "address that other hosts see, or with the right --local-addr"
)


def reachable(facts: Facts) -> Iterator[Finding]:
    missed = {node: why for node, why in facts.peers.items() if why}
    for node, why in list(missed.items())[:_NAMED]:
        address, port = _place(facts.view, node)
        yield fail(
            f"{display_name(node)} at {address}:{port} cannot be reached from here: {why}",
            "open the ports between the nodes (any port above 1024), or set --local-addr there to "
            "an address that this host reaches; without links its death is noticed by its lease",
        )
    if len(missed) > _NAMED:
        yield fail(f"{len(missed) - _NAMED} more nodes cannot be reached from here")
    if facts.peers and not missed:
        yield ok(f"{len(facts.peers)} nodes can be reached from here")


def launchers(facts: Facts) -> Iterator[Finding]:
    """Two agents of one job on one host."""
    by_host: dict[str, list[str]] = {}
    for node in _nodes(facts.view):
        by_host.setdefault(display_name(node.node_id), []).append(node.node_id)
    for host, nodes in by_host.items():
        if len(nodes) > 1 and "~" in nodes[0]:
            pids = ", ".join(node.split("~")[1] for node in nodes[:_NAMED])
            yield warn(
                f"{len(nodes)} agents of the job are on host {host} (pids {pids}): each of them is "
                "a node",
                "end all but one, unless one host is to be several nodes; workers are set with "
                "--nproc-per-node",
            )


def last_end(facts: Facts) -> Iterator[Finding]:
    view = facts.view
    if view is None or view.control.closure is None:
        return
    if not view.control.closure.succeeded:
        yield warn(f"the last run {closed_text(view.control)}", "see the logs of that node")


def _nodes(view: JobView | None) -> list[NodeInfo]:
    return [] if view is None else [presence.info for presence in view.nodes.present.values()]


def _place(view: JobView | None, node_id: str) -> tuple[str, int]:
    info = next((node for node in _nodes(view) if node.node_id == node_id), None)
    return ("?", 0) if info is None else (info.address, info.peer_port)


CHECKS: tuple[Check, ...] = (
    default_id,
    is_there,
    entangled,
    also_waits,
    same_settings,
    strangers,
    master,
    reachable,
    launchers,
    last_end,
)
