"""``gpu``: nodes × workers on CUDA: from launch to the first allreduce, and after a kill.

NCCL if every rank can have a GPU of its own (it refuses two ranks on one), otherwise gloo on CUDA
tensors with ranks that share GPUs. Without CUDA, or with ``--device cpu``, the same on the CPU: a
dry run, whose numbers say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import options, results
from benchmarks.environment import describe
from benchmarks.etcd_server import BenchmarkEtcd, choose_binary, no_v2, running_etcd, speaks_v2
from benchmarks.jobs import OWN_STORE, JobError, JobOptions, TracedAgent, TracedJob, phases
from benchmarks.recording import recording
from tests.support.processes import free_port

NAME = "gpu"
BACKENDS = ("etcd3", "c10d", f"c10d{OWN_STORE}", "etcd-v2", f"etcd-v2{OWN_STORE}", "etcd")
V2_BACKENDS = ("etcd-v2", f"etcd-v2{OWN_STORE}", "etcd")
LAUNCH = ("rendezvous", "process_group", "first_allreduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", type=options.names(*BACKENDS), default=list(BACKENDS), help="which backends"
    )
    parser.add_argument("--nodes", type=options.numbers, default=[2, 4], help="sizes of the job")
    parser.add_argument("--workers", type=options.numbers, default=[1], help="per node")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="what ranks compute on"
    )
    parser.add_argument("--repeat", type=options.count, default=3, help="runs of each")
    parser.add_argument("--lease-ttl", type=options.count, default=10, help="of etcd3, in s")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="for the start, and after a kill"
    )
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="measure starts only")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    binary = choose_binary(args.etcd)
    v2 = speaks_v2(binary)
    device = _device(args.device)
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    environment.update(_gpus(device))
    parts = [
        (nodes, workers, backend)
        for nodes in args.nodes
        for workers in args.workers
        for _ in range(args.repeat)
        for backend in args.backends
    ]
    with (
        running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server,
        recording(args, NAME, environment, len(parts)) as record,
    ):
        for nodes, workers, backend in parts:
            sample: dict[str, Any] = {"backend": backend, "nodes": nodes, "workers": workers}
            sample.update(device=device, collectives=_collectives(device, nodes * workers))
            if backend in V2_BACKENDS and not v2:
                sample["failed"] = no_v2(binary)
            else:
                sample.update(_measure(sample, server, args))
            record.add(f"{backend}, {nodes} nodes x {workers}", sample)
    return record.document


def _device(wanted: str) -> str:
    """Return ``cuda`` or ``cpu``; raises RuntimeError if CUDA was asked for and is not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise RuntimeError("--device cuda: torch finds no CUDA device here")
    if wanted == "auto":
        return "cuda" if there else "cpu"
    return wanted


def _gpus(device: str) -> dict[str, object]:
    if device == "cpu":
        return {"gpus": []}
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"gpus": names, "cuda": torch.version.cuda, "nccl": nccl}


def _collectives(device: str, ranks: int) -> str:
    return "nccl" if device == "cuda" and ranks <= torch.cuda.device_count() else "gloo"


def _visible(sample: dict[str, Any], node: int) -> dict[str, str]:
    """Give each node its own GPUs where there are enough; otherwise all see all."""
    if sample["collectives"] != "nccl":
        return {}
    first = node * sample["workers"]
    own = range(first, first + sample["workers"])
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}


def _measure(
    sample: dict[str, Any], server: BenchmarkEtcd, args: argparse.Namespace
) -> dict[str, Any]:
    nodes, backend = sample["nodes"], sample["backend"]
    endpoint = f"127.0.0.1:{free_port()}" if backend.startswith("c10d") else server.target
    job_options = JobOptions(
        backend,
        endpoint,
        nnodes=f"{max(1, nodes - 1)}:{nodes}",  # one may be lost
        workers=sample["workers"],
        conf={"lease_ttl": str(args.lease_ttl)} if backend == "etcd3" else {},
        device=sample["device"],
        collectives=sample["collectives"],
    )
    with (
        tempfile.TemporaryDirectory(prefix="rdzv-bench-job-") as folder,
        TracedJob(job_options, Path(folder)) as job,
    ):
        begin_s = time.monotonic()
        agents = []
        for node in range(nodes):
            conf = {"is_host": str(node == nodes - 1).lower()} if job_options.is_c10d else {}
            agents.append(job.start(f"n{node}", conf=conf, env=_visible(sample, node)))
        try:
            job.await_steps(agents, after_s=begin_s, limit_s=args.limit, steps=10)
        except JobError as error:
            return {"failed": f"start: {error}"}
        measured: dict[str, Any] = {"launch": _launch(agents, begin_s)}
        if args.kill:
            measured["after_kill"] = _after_kill(job, agents, args.limit)
        return measured


def _launch(agents: Sequence[TracedAgent], begin_s: float) -> dict[str, float]:
    """Return the seconds from the launch until the last agent or worker has got that far.

    ``rendezvous_only`` is from the last agent's call to the last agent's rank.
    """
    notes = [note for agent in agents for note in agent.notes()]
    first_steps: dict[int, float] = {}
    for note in notes:
        if note.event == "step":
            first_steps.setdefault(note.pid, note.time_s)
    joined_s = max(note.time_s for note in notes if note.event == "rendezvous_end")
    return {
        "rendezvous": joined_s - begin_s,
        "process_group": max(n.time_s for n in notes if n.event == "process_group") - begin_s,
        "first_allreduce": max(first_steps.values()) - begin_s,
        "rendezvous_only": joined_s
        - max(note.time_s for note in notes if note.event == "rendezvous_begin"),
    }


def _after_kill(job: TracedJob, agents: Sequence[TracedAgent], limit_s: float) -> dict[str, Any]:
    """Kill a node that is neither rank 0 nor c10d's host if there is one; alone, a worker."""
    if len(agents) == 1:
        event_s, running = agents[0].kill_worker(), list(agents)
    else:
        host = agents[-1] if job.options.is_c10d else None
        plain = [agent for agent in agents if agent is not host and agent.rank() != 0]
        victim = plain[0] if plain else next(agent for agent in agents if agent is not host)
        event_s, running = victim.kill(), [agent for agent in agents if agent is not victim]
    try:
        job.await_steps(running, after_s=event_s, limit_s=limit_s)
    except JobError as error:
        return {"failed": results.failure(error)}
    return phases(running, event_s)


def summarize(document: dict[str, Any]) -> dict[tuple[int, int, str], dict[str, Any]]:
    """Return medians per nodes, workers and backend."""
    grouped: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for sample in document["results"]:
        key = (sample["nodes"], sample["workers"], sample["backend"])
        grouped.setdefault(key, []).append(sample)
    summary = {}
    for key, samples in sorted(grouped.items(), key=lambda one: one[0][:2]):
        launched = [sample["launch"] for sample in samples if "launch" in sample]
        killed = [sample["after_kill"] for sample in samples if "after_kill" in sample]
        recovered = [one["total"] for one in killed if "failed" not in one]
        row: dict[str, Any] = {"collectives": samples[0]["collectives"], "runs": len(samples)}
        row["failed"] = len(samples) - len(launched) + len(killed) - len(recovered)
        for name in (*LAUNCH, "rendezvous_only"):
            if launched:
                row[name] = results.statistics([one[name] for one in launched])["median"]
        if recovered:
            row["after_kill"] = results.statistics(recovered)["median"]
        summary[key] = row
    return summary
