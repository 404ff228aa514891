"""``scale``: thousands of simulated nodes on the real core and schema, against a real etcd."""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks import options, results
from benchmarks.environment import describe
from benchmarks.etcd_server import BenchmarkEtcd, Counters, choose_binary, running_etcd
from benchmarks.fleet import Fleet, FleetError, Run
from benchmarks.loop_thread import LoopHold
from benchmarks.plan import FIRST_SIMULATED_PROCESS, LEADER_PROCESS, Plan
from benchmarks.recording import recording
from benchmarks.scale_bare import BareProcess
from benchmarks.scale_nodes import scale_process
from rdzv_etcd.etcd.client import EtcdClient

NAME = "scale"
BARE, OURS = "bare", "etcd3"
SETUP, FIRST, IDLE = "set-up", "first round", "idle"
ONE, LEADER, TENTH = "one lost", "leader lost", "10 % lost"
PHASES = (SETUP, FIRST, IDLE, ONE, LEADER, TENTH)
_LOSSES = {ONE: "lose_alone", LEADER: "lose_leader", TENTH: "lose_together"}
_NOT_OF_A_ROUND = ("LeaseKeepAlive", "LeaseRevoke")
_REVOKES_AT_ONCE = 16
"""As etcd revokes leases that have expired."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=options.numbers,
        default=[256, 1024, 4096, 10_000],
        help="how many are simulated",
    )
    parser.add_argument(
        "--kinds",
        type=options.names(OURS, BARE),
        default=[OURS, BARE],
        help="the library, and the same calls with nothing around them",
    )
    parser.add_argument(
        "--phases", type=options.names(*PHASES), default=list(PHASES), help="what is measured"
    )
    parser.add_argument("--repeat", type=options.count, default=1, help="runs of each size")
    parser.add_argument("--heads", type=options.count, default=16, help="real nodes that may lead")
    parser.add_argument("--processes", type=options.count, default=2, help="of simulated nodes")
    parser.add_argument("--connections", type=options.count, default=4, help="of each process")
    parser.add_argument(
        "--slice-nodes", type=options.count, default=128, help="the option slice_nodes"
    )
    parser.add_argument(
        "--rack-nodes",
        type=options.count,
        default=1,
        help="only whole racks of so many nodes are in a world; 1: there are no racks",
    )
    parser.add_argument("--lease-ttl", type=options.count, default=10, help="seconds")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds; a lease's TTL at least")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one phase")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size on a fresh etcd, ours and the floor in turn."""
    binary = choose_binary(args.etcd)
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    runs = [
        (nodes, repeat, kind)
        for nodes in args.nodes
        for repeat in range(args.repeat)
        for kind in args.kinds
    ]
    with recording(args, NAME, environment, len(runs)) as record:
        for nodes, repeat, kind in runs:
            with running_etcd(binary, args.data, fsync=args.fsync) as server:
                plan = _plan(args, server, nodes)
                measure = _measure if kind == OURS else _measure_bare
                samples = measure(plan, server, args)
            about = {"kind": kind, "nodes": nodes, "repeat": repeat}
            record.add(f"{kind}, {nodes:,} nodes", *({**about, **sample} for sample in samples))
    return record.document


def _plan(args: argparse.Namespace, server: BenchmarkEtcd, nodes: int) -> Plan:
    return Plan(
        target=server.target,
        job=f"job-{uuid.uuid4().hex[:8]}",
        nodes=nodes,
        heads=max(2, min(args.heads, nodes // 4)),
        processes=args.processes,
        connections=args.connections,
        lease_ttl_s=args.lease_ttl,
        slice_nodes=args.slice_nodes,
        rack_nodes=args.rack_nodes,
    )


@dataclass(frozen=True)
class Reading:
    """What had been spent at one moment."""

    at_s: float
    etcd: Counters
    cpu_s: Sequence[float]
    """By process."""


class _Meter:
    """Measures one run's phases, and turns what failed into samples."""

    def __init__(self, plan: Plan, server: BenchmarkEtcd, fleet: Fleet, limit_s: float) -> None:
        self.plan = plan
        self.fleet = fleet
        self.limit_s = limit_s
        self.alive = set(range(plan.nodes))
        self._server = server

    def read(self) -> Reading:
        cpu_s = self.fleet.call("cpu_s", self.limit_s)
        return Reading(time.monotonic(), self._server.counters(), cpu_s)

    def call(self, method: str) -> list[Any]:
        return self.fleet.call(method, self.limit_s)

    def costs(self, before: Reading, after: Reading, *, lost: int = 0) -> dict[str, Any]:
        """Return what was spent between two readings, in all and per node that is there."""
        spent, nodes = after.etcd.since(before.etcd), len(self.alive)
        cpu_s = [end - begin for begin, end in zip(before.cpu_s, after.cpu_s, strict=True)]
        requests = {k: n for k, n in spent.messages.items() if k not in _NOT_OF_A_ROUND}
        # losing a node's lease deletes its keys, which raises the revision without a request
        refused = spent.refused.get("Txn", 0.0)
        done = spent.messages.get("Txn", 0.0) - refused
        failed = max(0.0, done - (spent.revision - lost))
        return {
            "alive": nodes,
            "took_s": after.at_s - before.at_s,
            "requests_per_node": sum(requests.values()) / nodes,
            "failed_compares_per_node": failed / nodes,
            "refused_per_node": refused / nodes,
            "bytes_per_node": spent.grpc_bytes / nodes,
            "keep_alives_per_node": spent.messages.get("LeaseKeepAlive", 0.0) / nodes,
            "etcd_cpu_s": spent.cpu_s,
            "simulator_cpu_s": sum(cpu_s[FIRST_SIMULATED_PROCESS:]),
            "leader_cpu_s": sum(cpu_s[:FIRST_SIMULATED_PROCESS]),
            "writes": spent.revision,
            "etcd": spent.as_json(),
        }

    def times(self, answers: Sequence[dict[str, Any]], begin_s: float) -> dict[str, Any]:
        """Check that the world is right, and say when everybody got there.

        Raises :class:`WrongWorldError`.
        """
        problems = [problem for answer in answers for problem in answer["problems"]]
        if problems:
            raise WrongWorldError("; ".join(problems[:3]))
        nodes = [node for answer in answers for node in answer["nodes"]]
        gone = set(range(self.plan.nodes)) - self.alive
        check_world(nodes, self.plan.seated(gone))
        told, arrived, ranked = zip(*(times for *_, times in nodes), strict=True)
        since = [time_s - begin_s for time_s in ranked]
        steps = {"told_s": max(told) - begin_s, "arrived_s": max(arrived) - begin_s}
        return {
            "seconds": max(since),
            **{step: time_s for step, time_s in steps.items() if time_s > 0},
            "first_rank_s": min(since),
            "rank": results.statistics(since),
            "resigned_so_far": sum(answer["resigned"] for answer in answers),
        }


class WrongWorldError(Exception):
    """The nodes do not form one world."""


def check_world(nodes: Sequence[Any], seated: Collection[int]) -> None:
    """These nodes hold a rank of the same round, and each rank is held once."""
    indices = sorted(index for index, *_ in nodes)
    if indices != sorted(seated):
        raise WrongWorldError(f"{len(indices)} nodes hold ranks, {len(seated)} should")
    places = {place for _, _, place, _ in nodes}
    if len(places) != 1:
        raise WrongWorldError(f"the nodes see different worlds: {sorted(places)[:4]}")
    ranks = sorted(rank for _, rank, *_ in nodes)
    if ranks != list(range(len(nodes))):
        raise WrongWorldError("the ranks are not 0 to n-1, each once")
    ((_, size, *_),) = places
    if size != len(nodes):
        raise WrongWorldError(f"a world of {size} with {len(nodes)} nodes")


def _measure(plan: Plan, server: BenchmarkEtcd, args: argparse.Namespace) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    phase = SETUP
    try:
        with Fleet(functools.partial(scale_process, plan), plan.size) as fleet:
            meter = _Meter(plan, server, fleet, args.limit)
            begin = Reading(time.monotonic(), server.counters(), [0.0] * plan.size)
            fleet.prepare(args.limit)
            ready = meter.read()
            samples.append({"phase": SETUP, **meter.costs(begin, ready)})
            phase = FIRST
            samples.append({"phase": FIRST, **_first_round(meter, ready)})
            meter.call("watch_own")
            # idle before the losses: a leader that has only just come trusts no absence for a TTL
            for phase in PHASES[2:]:
                if phase not in args.phases:
                    continue
                part = _idle(meter, args.idle) if phase == IDLE else _loss(meter, phase)
                samples.append({"phase": phase, **part})
    except (FleetError, WrongWorldError) as error:
        samples.append({"phase": phase, "failed": results.failure(error)})
    return samples


def _first_round(meter: _Meter, before: Reading) -> dict[str, Any]:
    meter.call("lead")
    meter.call("follow")
    runs = meter.fleet.run(meter.limit_s)
    after = meter.read()
    return {**_run_times(meter, runs), **meter.costs(before, after)}


def _run_times(meter: _Meter, runs: Sequence[Run]) -> dict[str, Any]:
    called_s = max(run.called_s for run in runs[FIRST_SIMULATED_PROCESS:])
    return meter.times([run.said for run in runs], called_s)


def _idle(meter: _Meter, idle_s: float) -> dict[str, Any]:
    before = meter.read()
    time.sleep(idle_s)
    return meter.costs(before, meter.read())


def _loss(meter: _Meter, phase: str) -> dict[str, Any]:
    """Lose nodes by revoking their leases, as etcd does when they expire."""
    leases = [lease for lost in meter.call(_LOSSES[phase]) for lease in lost]
    lost = _victims(meter.plan, phase) & meter.alive
    if len(leases) != len(lost):
        raise WrongWorldError(f"{len(leases)} nodes were stopped instead of {len(lost)}")
    meter.alive -= lost
    before = meter.read()
    begin_s = time.monotonic()
    LoopHold().run(_revoke(meter.plan, leases))
    revoked_s = time.monotonic() - begin_s
    answers = meter.call("hold_ranks")
    after = meter.read()
    return {
        "lost": len(lost),
        "revoked_s": revoked_s,
        **meter.times(answers, begin_s),
        **meter.costs(before, after, lost=len(lost)),
    }


def _victims(plan: Plan, phase: str) -> frozenset[int]:
    if phase == ONE:
        return plan.lost_alone
    return plan.lost_together if phase == TENTH else frozenset({LEADER_PROCESS})


async def _revoke(plan: Plan, leases: Sequence[int]) -> None:
    client = EtcdClient(plan.connection)
    gate = asyncio.Semaphore(_REVOKES_AT_ONCE)

    async def revoke(lease: int) -> None:
        async with gate:
            await client.revoke(lease)

    await asyncio.gather(*(revoke(lease) for lease in leases))
    await client.close()


def _measure_bare(
    plan: Plan, server: BenchmarkEtcd, args: argparse.Namespace
) -> list[dict[str, Any]]:
    plan = replace(plan, rack_nodes=1)
    try:
        with Fleet(functools.partial(BareProcess, plan), plan.size) as fleet:
            meter = _Meter(plan, server, fleet, args.limit)
            fleet.prepare(args.limit)
            before = meter.read()
            runs = fleet.run(args.limit)
            after = meter.read()
            return [{"phase": FIRST, **_run_times(meter, runs), **meter.costs(before, after)}]
    except (FleetError, WrongWorldError) as error:
        return [{"phase": FIRST, "failed": results.failure(error)}]


Row = dict[str, float]


def summarize(document: dict[str, Any]) -> dict[tuple[str, str, int], Row]:
    """Return per kind, phase and size the medians of the repeats, per node where that makes sense.

    The keep-alives' share of bytes is taken out of all phases but idle: it grows with the time that
    this machine takes for a phase, not with the number of nodes.
    """
    grouped: dict[tuple[str, str, int], list[Row]] = {}
    for sample in document["results"]:
        if "failed" in sample:
            continue
        key = (sample["kind"], sample["phase"], sample["nodes"])
        grouped.setdefault(key, []).append(_row(sample))
    summary = {key: _medians(rows) for key, rows in grouped.items()}
    for (kind, phase, nodes), row in summary.items():
        idle = summary.get((kind, IDLE, nodes))
        if idle and phase != IDLE and idle["keep_alives_per_node"]:
            each = idle["bytes_per_node"] / idle["keep_alives_per_node"]
            row["bytes_per_node"] -= each * row["keep_alives_per_node"]
    return summary


def _row(sample: dict[str, Any]) -> Row:
    row = {name: value for name, value in sample.items() if isinstance(value, int | float)}
    for name in ("etcd_cpu_s", "simulator_cpu_s"):
        row[f"{name}_per_node"] = sample[name] / sample["alive"]
    if sample["phase"] == IDLE:
        row["etcd_cpu_share"] = sample["etcd_cpu_s"] / sample["took_s"]
    return row


def _medians(rows: Sequence[Row]) -> Row:
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def fit(summary: dict[tuple[str, str, int], Row], kind: str, phase: str, name: str) -> float | None:
    """Return the exponent x of the fit ``N ** x`` (log-log, least squares); 1 is linear."""
    points = [
        (nodes, row[name])
        for (of_kind, of_phase, nodes), row in summary.items()
        if (of_kind, of_phase) == (kind, phase) and row.get(name, 0.0) > 0
    ]
    if len({nodes for nodes, _ in points}) < 2:
        return None
    nodes, values = np.log(np.asarray(points, dtype=float)).T
    return float(np.polyfit(nodes, values, 1)[0])


def parts(document: dict[str, Any]) -> list[tuple[str, str]]:
    seen = {(sample["kind"], sample["phase"]) for sample in document["results"]}
    return [(kind, phase) for phase in PHASES for kind in (OURS, BARE) if (kind, phase) in seen]
