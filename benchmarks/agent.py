"""``agent``: what a backend costs in the agent's process, idle included, and in the workers', and
what the etcds cost that agents start.

Every process is started afresh and imports for itself, as torchrun and its workers do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks import options, results
from benchmarks.agent_probe import NONE, AgentProbe, WorkerProbe
from benchmarks.environment import describe
from benchmarks.etcd_server import BenchmarkEtcd, choose_binary, no_v2, running_etcd, speaks_v2
from benchmarks.fleet import Fleet, FleetError
from benchmarks.jobs import EMBEDDED
from benchmarks.recording import recording
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary

NAME = "agent"
V2_BACKENDS = ("etcd-v2", "etcd")
ALONE = f"{EMBEDDED} alone"
HOSTS = {ALONE: 1, EMBEDDED: 3}
"""On how many hosts, here addresses of this machine, an etcd is started."""
BACKENDS = ("etcd3", *HOSTS, "c10d", *V2_BACKENDS, NONE)
MEMBER = ("cpu_percent", "etcd_mb", "supervisor_mb")
"""What is seen of each etcd that was started, idle; the CPU is its supervisor's as well."""
_SLACK_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends",
        type=options.names(*BACKENDS),
        default=["etcd3", *HOSTS, "c10d", NONE],
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
                elif backend in HOSTS:
                    sample.update(_measure_embedded(HOSTS[backend], binary, args))
                else:
                    with running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server:
                        sample.update(_measure(backend, server, args))
                record.add(backend, sample)
            for with_plugin in (True, False):
                record.add("worker", _measure_worker(with_plugin))
    return record.document


def _measure(backend: str, server: BenchmarkEtcd, args: argparse.Namespace) -> dict[str, Any]:
    endpoint = f"127.0.0.1:{free_port()}" if backend == "c10d" else server.target
    try:
        with _idle_job(backend, endpoint, args) as fleet:
            before = server.counters()
            fleet.call("idle", args.idle + _SLACK_S)
            spent = server.counters().since(before)
            told = _end(fleet)
    except FleetError as error:
        return {"failed": results.failure(error)}
    return {
        "processes": told,
        "idle_etcd": spent.as_json(),
        "idle_writes_per_node_minute": spent.proposals / args.nodes / (args.idle / 60),
    }


def _measure_embedded(hosts: int, binary: EtcdBinary, args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    endpoints = [f"127.0.0.{number}:{port}" for number in range(1, hosts + 1)]
    try:
        with _idle_job("etcd3", ",".join(endpoints), args, str(binary.path)) as fleet:
            etcds = [it for it in psutil.process_iter() if _serves(it, endpoints)]
            kept = [(etcd, parent) for etcd in etcds if (parent := etcd.parent()) is not None]
            before, begin_s = list(map(_spent_s, kept)), time.monotonic()
            fleet.call("idle", args.idle + _SLACK_S)
            idle_s = time.monotonic() - begin_s
            members = [
                {
                    "cpu_percent": 100 * (_spent_s(pair) - spent_s) / idle_s,
                    "etcd_mb": pair[0].memory_info().rss / 1e6,
                    "supervisor_mb": pair[1].memory_info().rss / 1e6,
                }
                for pair, spent_s in zip(kept, before, strict=True)
            ]
            told = _end(fleet)
            while left := psutil.wait_procs([supervisor for _, supervisor in kept], 1)[1]:
                for supervisor in left:
                    supervisor.terminate()  # a second signal counts even if it cannot be spared
    except FleetError as error:
        return {"failed": results.failure(error)}
    return {"processes": told, "members": members}


def _serves(process: psutil.Process, endpoints: list[str]) -> bool:
    """Whether it is the etcd that clients find at one of them."""
    with contextlib.suppress(psutil.Error):
        said = " ".join(process.cmdline())
        return process.name() == "etcd" and any(f"//{it} " in said for it in endpoints)
    return False


def _spent_s(processes: tuple[psutil.Process, ...]) -> float:
    """Return the CPU time that they have used."""
    times = [process.cpu_times() for process in processes]
    return sum(it.user + it.system for it in times)


@contextlib.contextmanager
def _idle_job(
    backend: str, endpoint: str, args: argparse.Namespace, embeds: str | None = None
) -> Iterator[Fleet]:
    """Form one round of real handlers. ``embeds``: the etcd that they start. Raises FleetError."""
    job = f"job-{uuid.uuid4().hex[:8]}"
    how = (backend, endpoint, job, args.nodes, args.poll, args.idle, embeds)
    with Fleet(functools.partial(AgentProbe, *how), args.nodes, start="spawn") as fleet:
        fleet.prepare(_SLACK_S)
        fleet.run(_SLACK_S)
        yield fleet


def _end(fleet: Fleet) -> list[Any]:
    """Ask every process what it cost, and end the job."""
    told = fleet.call("tell", _SLACK_S)
    fleet.finish(_SLACK_S)
    return told


def _measure_worker(with_plugin: bool) -> dict[str, Any]:
    with Fleet(functools.partial(WorkerProbe, with_plugin), 1, start="spawn") as fleet:
        fleet.prepare(_SLACK_S)
        (seen,) = fleet.run(_SLACK_S)
    return {"what": "worker", "with_plugin": with_plugin, **seen.said}


def summarize(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return per backend the medians over processes and repeats; memory is what it added, and the
    slowest set-up of each repeat counts: the first agent may start what the others use."""
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
            "handler_s": _median(
                [max(p.get("handler_s", 0.0) for p in sample["processes"]) for sample in good]
            ),
            "rss_mb": _median(added),
            "threads": _median(threads),
            "idle_cpu_percent": _median([p["idle_cpu_percent"] for p in processes]),
        }
        if backend in HOSTS:
            members = [member for sample in good for member in sample["members"]]
            rows[backend] |= {
                name: _median([member[name] for member in members]) for name in MEMBER
            }
        else:
            rows[backend]["idle_writes"] = _median(
                [sample["idle_writes_per_node_minute"] for sample in good]
            )
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
