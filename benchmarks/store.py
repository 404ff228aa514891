"""``store``: our ``EtcdStore``, torch's, and ``TCPStore``: single calls, and agents on them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import uuid
from collections.abc import Callable
from typing import Any

from benchmarks import options, results
from benchmarks.environment import describe
from benchmarks.etcd_server import choose_binary, no_v2, running_etcd, speaks_v2
from benchmarks.fleet import Fleet, FleetError, Make
from benchmarks.recording import recording
from benchmarks.store_clients import STORES, TCP, TORCH_ETCD
from benchmarks.store_work import Adding, Agents, Operations, Waiting, Where, operations
from tests.support.processes import free_port

NAME = "store"
Samples = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stores", type=options.names(*STORES), default=list(STORES), help="which stores"
    )
    parser.add_argument("--count", type=options.count, default=200, help="of each single call")
    parser.add_argument("--batch", type=options.count, default=1000, help="keys in multi_…")
    parser.add_argument(
        "--writers", type=options.count, default=64, help="threads that add to one counter"
    )
    parser.add_argument("--adds", type=options.count, default=20, help="by each writer")
    parser.add_argument(
        "--agents",
        type=options.numbers,
        default=[64, 256, 1024, 4096],
        help="how many exchange their ranks",
    )
    parser.add_argument("--processes", type=options.count, default=8, help="that hold the agents")
    parser.add_argument("--repeat", type=options.count, default=3, help="of what agents do")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one measurement")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    binary = choose_binary(args.etcd)
    v2 = speaks_v2(binary)
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    with running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server:
        parts = [(kind, *each) for each in _measurements(args) for kind in args.stores]
        with recording(args, NAME, environment, len(parts)) as record:
            for kind, what, measure in parts:
                part = f"{what}, {kind}"
                if kind == TORCH_ETCD and not v2:
                    record.add(part, {"store": kind, "failed": no_v2(binary)})
                    continue
                endpoint = f"127.0.0.1:{free_port()}" if kind == TCP else server.target
                job = f"job-{uuid.uuid4().hex[:8]}"
                record.add(part, *measure(Where(kind, endpoint, job, args.limit)))
    return record.document


def _measurements(args: argparse.Namespace) -> list[tuple[str, Callable[[Where], Samples]]]:
    """What each is called, and what does it."""
    measurements: list[tuple[str, Callable[[Where], Samples]]] = [
        ("single calls", functools.partial(_operations, args.count, args.batch)),
        ("wait", functools.partial(_waiting, args.count)),
        (f"add, {args.writers} writers", functools.partial(_adding, args.writers, args.adds)),
    ]
    for _ in range(args.repeat):
        for agents in args.agents:
            for what in ("exchange", "barrier"):
                processes = min(args.processes, agents)
                measure = functools.partial(_agents, what, agents, processes)
                measurements.append((f"{what}, {agents:,} agents", measure))
    return measurements


def _operations(count: int, batch: int, where: Where) -> Samples:
    names = operations(batch)
    where = dataclasses.replace(where, limit_s=len(names) * where.limit_s)
    answer = _run(functools.partial(Operations, where, count, batch), 1, where)
    if isinstance(answer, str):
        return [_failed(where, name, answer) for name in names]
    (run,) = answer
    return [
        {"store": where.kind, "operation": operation, "seconds": seconds}
        for operation, seconds in run.said.items()
    ]


def _waiting(count: int, where: Where) -> Samples:
    answer = _run(functools.partial(Waiting, where, count), 2, where)
    if isinstance(answer, str):
        return [_failed(where, "wait", answer)]
    woken, told = (run.said["moments"] for run in answer)
    seconds = [end - begin for begin, end in zip(told, woken, strict=True)]
    return [{"store": where.kind, "operation": "wait", "seconds": seconds}]


def _adding(writers: int, adds: int, where: Where) -> Samples:
    """Seconds per add: the time all of them took, divided by their number."""
    operation = f"add, {writers} writers"
    answer = _run(functools.partial(Adding, where, adds), writers, where)
    if isinstance(answer, str):
        return [_failed(where, operation, answer)]
    sums = sorted(number for run in answer for number in run.said["sums"])
    if sums != list(range(1, writers * adds + 1)):
        return [_failed(where, operation, "the sums are wrong")]
    took_s = max(run.returned_s for run in answer) - min(run.called_s for run in answer)
    each = [seconds for run in answer for seconds in run.said["seconds"]]
    return [
        {
            "store": where.kind,
            "operation": operation,
            "seconds": [took_s / len(sums)],
            "call_seconds": each,
        }
    ]


def _agents(what: str, agents: int, processes: int, where: Where) -> Samples:
    """From the last process that let its agents loose to the last agent's return."""
    answer = _run(functools.partial(Agents, where, what, agents, processes), processes, where)
    sample = {"store": where.kind, "operation": what, "agents": agents}
    if isinstance(answer, str):
        return [{**sample, "failed": answer}]
    last_call_s = max(run.called_s for run in answer)
    return [{**sample, "seconds": [max(run.returned_s for run in answer) - last_call_s]}]


def _run(make: Make, processes: int, where: Where) -> Any:
    """Return the runs, or what went wrong as a text."""
    try:
        with Fleet(make, processes) as fleet:
            fleet.prepare(where.limit_s)
            runs = fleet.run(where.limit_s)
            fleet.finish(where.limit_s)
    except FleetError as error:
        return results.failure(error)
    return runs


def _failed(where: Where, operation: str, why: str) -> dict[str, Any]:
    return {"store": where.kind, "operation": operation, "failed": why}


def summarize(document: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return per operation and store the median seconds, ``None`` for what failed."""
    collected: dict[str, dict[str, list[float]]] = {}
    for sample in document["results"]:
        operation = sample.get("operation", "everything")
        if "agents" in sample:
            named = {"exchange": "rank exchange", "barrier": "exit barrier"}[operation]
            operation = f"{named}, {sample['agents']:,} agents"
        stores = collected.setdefault(operation, {})
        stores.setdefault(sample["store"], []).extend(sample.get("seconds", []))
    return {
        operation: {
            store: results.statistics(seconds)["median"] if seconds else None
            for store, seconds in stores.items()
        }
        for operation, stores in collected.items()
    }
