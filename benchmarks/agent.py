"""``agent``: what a backend costs in the agent's process, idle included, and in the workers'.

Every process is started afresh and imports for itself, as torchrun and its workers do.
"""

from __future__ import annotations

import argparse
import functools
import uuid
from typing import Any

from benchmarks import options, results
from benchmarks.agent_probe import NONE, AgentProbe, WorkerProbe
from benchmarks.environment import describe
from benchmarks.etcd_server import BenchmarkEtcd, choose_binary, no_v2, running_etcd, speaks_v2
from benchmarks.fleet import Fleet, FleetError
from benchmarks.recording import recording
from tests.support.processes import free_port

NAME = "agent"
V2_BACKENDS = ("etcd-v2", "etcd")
BACKENDS = ("etcd3", "c10d", *V2_BACKENDS, NONE)
_SLACK_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends",
        type=options.names(*BACKENDS),
        default=["etcd3", "c10d", NONE],
        help="which backends",
    )
    parser.add_argument("--nodes", type=options.count, default=2, help="agents of the job")
    parser.add_argument("--repeat", type=options.count, default=3, help="runs of each backend")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of idleness to observe")
    parser.add_argument("--poll", type=float, default=0.1, help="the agent's monitor interval")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    binary = choose_binary(args.etcd)
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    steps = args.repeat * (len(args.backends) + 2)
    with recording(args, NAME, environment, steps) as record:
        for _ in range(args.repeat):
            for backend in args.backends:
                v2 = backend in V2_BACKENDS
                sample: dict[str, Any] = {"what": "agent", "backend": backend}
                if v2 and not speaks_v2(binary):
                    sample["failed"] = no_v2(binary)
                else:
                    with running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server:
                        sample.update(_measure(backend, server, args))
                record.add(backend, sample)
            for with_plugin in (True, False):
                record.add("worker", _measure_worker(with_plugin))
    return record.document


def _measure(backend: str, server: BenchmarkEtcd, args: argparse.Namespace) -> dict[str, Any]:
    """Form one round of real handlers, let it idle, and ask every process what it cost."""
    endpoint = f"127.0.0.1:{free_port()}" if backend == "c10d" else server.target
    job = f"job-{uuid.uuid4().hex[:8]}"
    how = (backend, endpoint, job, args.nodes, args.poll, args.idle)
    try:
        with Fleet(functools.partial(AgentProbe, *how), args.nodes, start="spawn") as fleet:
            fleet.prepare(_SLACK_S)
            fleet.run(_SLACK_S)
            before = server.counters()
            fleet.call("idle", args.idle + _SLACK_S)
            spent = server.counters().since(before)
            told = fleet.call("tell", _SLACK_S)
            fleet.finish(_SLACK_S)
    except FleetError as error:
        return {"failed": results.failure(error)}
    return {
        "processes": told,
        "idle_etcd": spent.as_json(),
        "idle_writes_per_node_minute": spent.proposals / args.nodes / (args.idle / 60),
    }


def _measure_worker(with_plugin: bool) -> dict[str, Any]:
    with Fleet(functools.partial(WorkerProbe, with_plugin), 1, start="spawn") as fleet:
        fleet.prepare(_SLACK_S)
        (seen,) = fleet.run(_SLACK_S)
    return {"what": "worker", "with_plugin": with_plugin, **seen.said}


def summarize(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return per backend the medians over processes and repeats; memory is what it added."""
    rows: dict[str, dict[str, float]] = {}
    for backend in document["settings"]["backends"]:
        samples = [s for s in document["results"] if s.get("backend") == backend]
        good = [sample for sample in samples if "failed" not in sample]
        processes = [process for sample in good for process in sample["processes"]]
        if not processes:
            continue
        added = [p["idle"]["rss_mb"] - p["before"]["rss_mb"] for p in processes]
        threads = [p["idle"]["threads"] - p["before"]["threads"] for p in processes]
        rows[backend] = {
            "import_s": _median([p.get("import_s", 0.0) for p in processes]),
            "handler_s": _median([p.get("handler_s", 0.0) for p in processes]),
            "rss_mb": _median(added),
            "threads": _median(threads),
            "idle_cpu_percent": _median([p["idle_cpu_percent"] for p in processes]),
            "idle_writes": _median([sample["idle_writes_per_node_minute"] for sample in good]),
        }
    return rows


def summarize_workers(document: dict[str, Any]) -> dict[bool, dict[str, Any]]:
    """Return the workers' medians with and without the plugin, and what the plugin loaded."""
    rows: dict[bool, dict[str, Any]] = {}
    for with_plugin in (True, False):
        workers = [
            s
            for s in document["results"]
            if s["what"] == "worker" and s["with_plugin"] == with_plugin
        ]
        rows[with_plugin] = {
            name: _median([worker[name] for worker in workers])
            for name in ("import_s", "rss_mb", "threads")
        }
        rows[with_plugin]["modules"] = workers[0]["modules"]
    return rows


def _median(values: list[float]) -> float:
    return results.statistics(values)["median"]
