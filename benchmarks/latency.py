"""``latency``: from the last node's arrival to all of them holding their ranks."""

from __future__ import annotations

import argparse
import functools
import statistics as plain_statistics
import uuid
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks import options, results
from benchmarks.bare import BareNode
from benchmarks.environment import describe
from benchmarks.etcd_server import (
    BenchmarkEtcd,
    Counters,
    choose_binary,
    no_v2,
    running_etcd,
    speaks_v2,
)
from benchmarks.fleet import Fleet, FleetError, Make, Run
from benchmarks.participants import BACKENDS, V2_BACKENDS, HandlerNode
from benchmarks.recording import recording
from tests.support.processes import free_port

BARE = "bare"
NAME = "latency"
COSTS = (
    "requests_per_node",
    "failed_compares_per_node",
    "grpc_bytes_per_node",
    "bytes_per_node",
)
"""Per round; gRPC bytes are the messages that etcd counts itself, for its v3 API only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=options.numbers, default=[2, 8, 32, 64, 128], help="sizes of the world"
    )
    parser.add_argument(
        "--backends",
        type=options.names(*BACKENDS, BARE),
        default=[*BACKENDS, BARE],
        help="which backends",
    )
    parser.add_argument("--repeat", type=options.count, default=5, help="rounds of each size")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one round")
    parser.add_argument(
        "--start",
        choices=("forkserver", "spawn"),
        default="forkserver",
        help="how the nodes' processes are started",
    )
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure round-robin, so that a disturbance of the machine hits no backend alone."""
    binary = choose_binary(args.etcd)
    v2 = speaks_v2(binary)
    rounds = [
        (nodes, repeat, backend)
        for nodes in args.nodes
        for repeat in range(args.repeat)
        for backend in args.backends
    ]
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    with (
        running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server,
        recording(args, NAME, environment, len(rounds)) as record,
    ):
        for nodes, repeat, backend in rounds:
            sample: dict[str, Any] = {"backend": backend, "nodes": nodes, "repeat": repeat}
            if backend in V2_BACKENDS and not v2:
                sample["failed"] = no_v2(binary)
            else:
                sample.update(measure(backend, nodes, server, args.limit, args.start))
            record.add(f"{backend}, {nodes} nodes", sample)
    return record.document


def measure(
    backend: str, nodes: int, server: BenchmarkEtcd, limit_s: float, start: str
) -> dict[str, Any]:
    """Form one round with fresh processes; returns its raw sample."""
    before: list[tuple[Counters, int]] = []

    def parked() -> None:
        before.append((server.counters(), _loopback_bytes()))

    try:
        with Fleet(_participants(backend, nodes, server), nodes, start=start) as fleet:
            fleet.prepare(limit_s)
            runs = fleet.run(limit_s, parked=parked)
            sent = _loopback_bytes() - before[0][1]  # first: reading the counters sends, too
            spent = server.counters().since(before[0][0])
            fleet.finish(limit_s)
    except FleetError as error:
        return {"failed": results.failure(error)}
    sample = times(runs)
    if "failed" in sample:
        return sample
    return {**sample, "loopback_bytes": sent, "etcd": spent.as_json(), **_costs(runs, spent)}


def _participants(backend: str, nodes: int, server: BenchmarkEtcd) -> Make:
    job = f"job-{uuid.uuid4().hex[:8]}"
    if backend == BARE:
        return functools.partial(BareNode, server.target, job, nodes)
    endpoint = f"127.0.0.1:{free_port()}" if backend == "c10d" else server.target
    return functools.partial(HandlerNode, backend, endpoint, job, nodes)


def times(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what a round has taken, or how it failed if it is none."""
    ranks = sorted(node.said["rank"] for node in runs)
    if ranks != list(range(len(runs))):
        return {"failed": f"the ranks are {ranks}"}
    last_arrival_s = max(node.called_s for node in runs)
    return {
        "seconds": max(node.returned_s for node in runs) - last_arrival_s,
        "arrivals_spread_s": last_arrival_s - min(node.called_s for node in runs),
        "node_seconds": [round(node.returned_s - last_arrival_s, 6) for node in runs],
    }


def _costs(runs: Sequence[Run], spent: Counters) -> dict[str, float]:
    requests, failed = sum(spent.requests.values()), spent.failed_compares
    requests += sum(node.said.get("c10d_requests", 0) for node in runs)
    failed += sum(node.said.get("c10d_failed_compares", 0) for node in runs)
    return {
        "requests_per_node": requests / len(runs),
        "failed_compares_per_node": failed / len(runs),
    }


def _loopback_bytes() -> int:
    """Everything sent over loopback so far: the one count of bytes that exists for every backend.

    It contains TCP's own, and other programs': measure on a quiet machine.
    """
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def summarize(document: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return per backend and size the statistics of the rounds and the median costs per node."""
    summary = {}
    for (backend, nodes), samples in results.grouped(
        document["results"], "backend", "nodes"
    ).items():
        good = [sample for sample in samples if "failed" not in sample]
        row: dict[str, Any] = {"failed": len(samples) - len(good), "rounds": len(good)}
        if good:
            row.update(results.statistics([sample["seconds"] for sample in good]))
            for cost in ("requests_per_node", "failed_compares_per_node"):
                row[cost] = plain_statistics.median(sample[cost] for sample in good)
            row["grpc_bytes_per_node"] = plain_statistics.median(
                sample["etcd"]["grpc_bytes"] / nodes for sample in good
            )
            row["bytes_per_node"] = plain_statistics.median(
                sample["loopback_bytes"] / nodes for sample in good
            )
        summary[backend, nodes] = row
    return summary
