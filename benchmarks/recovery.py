"""``recovery``: what a death, a signal, a newcomer or a crash costs a real job, phase by phase.

Three torchrun agents, one gloo worker each that steps all the time, minimum two nodes; all settings
are the backends' defaults, except what ``--lease-ttl`` says. ``etcd3 in process`` is the same
without torchrun: three processes that step, and go on themselves; ``etcd3 in process under
torchrun`` is three agents, each of which looks after two such processes: there a case ends with the
next step of the other hosts. ``etcd3 embedded`` has no etcd
beside it: each agent's host runs a member of a cluster of three.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rdzv_etcd
from benchmarks import options, results
from benchmarks.environment import describe
from benchmarks.etcd_server import BenchmarkEtcd, choose_binary, no_v2, running_etcd, speaks_v2
from benchmarks.jobs import (
    EMBEDDED,
    HERE,
    IN_PROCESS,
    OWN_STORE,
    PHASES,
    SUPERVISED,
    JobError,
    JobOptions,
    Place,
    TracedAgent,
    TracedJob,
    phases,
)
from benchmarks.recording import recording
from benchmarks.timeline import NOBODY_LOST
from rdzv_etcd import JobEvents
from tests.support import netns
from tests.support.bridge import FaultBridge
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary

NAME = "recovery"
_OURS = ("etcd3", IN_PROCESS, SUPERVISED, EMBEDDED)
_TORCHRUN_S = ("etcd3", "c10d", f"c10d{OWN_STORE}", "etcd-v2", f"etcd-v2{OWN_STORE}", "etcd")
BACKENDS = (*_OURS, *_TORCHRUN_S[1:])
V2_BACKENDS = ("etcd-v2", f"etcd-v2{OWN_STORE}", "etcd")
CASES = {
    "member": "SIGKILL of a member",
    "rank0": "SIGKILL of rank 0",
    "silent": "power or network lost by a member's host",
    "leader": "SIGKILL of the leader",
    "store-host": "SIGKILL of all on the host that serves c10d's store, or on one that runs one of "
    "three embedded etcds",
    "store-silent": "power or network lost by such a host",
    "sigterm": "SIGTERM of a member",
    "node-added": "a node added",
    "worker-crash": "SIGKILL of a worker",
}
START_LIMIT_S = 180.0
_SETTLED_STEPS = 200
"""So many steps a job has made before anything happens to it, more than a second's: in a world's
first second less is certain about a silent member."""
_STORED_ON_A_HOST = (EMBEDDED, "c10d", f"c10d{OWN_STORE}")
_ONLY = {
    "leader": ("etcd3", IN_PROCESS),
    "store-host": _STORED_ON_A_HOST,
    "store-silent": _STORED_ON_A_HOST,
    "worker-crash": (SUPERVISED, *_TORCHRUN_S),  # without an agent it is that of a member
}
"""Cases that exist for some backends only."""
WITH_ITS_STORE = ("store-host", "store-silent")
_SILENT = ("silent", "store-silent")
_ON_HOSTS = (*_SILENT, "store-host")
"""Cases in which each agent has a host of its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", type=options.names(*BACKENDS), default=list(BACKENDS), help="which backends"
    )
    parser.add_argument(
        "--cases", type=options.names(*CASES), default=list(CASES), help="what happens"
    )
    parser.add_argument("--agents", type=options.count, default=3, help="before the event")
    parser.add_argument("--conf", default="", help="more of etcd3's, such as peer_links=0")
    parser.add_argument("--repeat", type=options.count, default=3, help="runs of each case")
    parser.add_argument("--lease-ttl", type=options.count, default=10, help="of etcd3, in s")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one recovery")
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    binary = choose_binary(args.etcd)
    v2 = speaks_v2(binary)
    environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
    parts = [
        (case, backend)
        for _ in range(args.repeat)
        for case in args.cases
        for backend in args.backends
        if backend in _ONLY.get(case, [each for each in BACKENDS if each != EMBEDDED])
    ]
    with (
        running_etcd(binary, args.data, fsync=args.fsync, v2=v2) as server,
        recording(args, NAME, environment, len(parts)) as record,
    ):
        for case, backend in parts:
            sample: dict[str, Any] = {"case": case, "backend": backend}
            if backend in V2_BACKENDS and not v2:
                sample["failed"] = no_v2(binary)
            else:
                sample.update(_measure(case, backend, server, binary, args))
            record.add(f"{case}, {backend}", sample)
    return record.document


def _measure(
    case: str,
    backend: str,
    server: BenchmarkEtcd,
    binary: EtcdBinary,
    args: argparse.Namespace,
) -> dict[str, Any]:
    conf = {"lease_ttl": str(args.lease_ttl)} if backend in _OURS else {}
    if backend in _OURS:
        conf.update(part.split("=", 1) for part in filter(None, args.conf.split(",")))
    nnodes = f"{args.agents - 1}:{args.agents}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-job-")))
        if case in _ON_HOSTS:
            if why_not := netns.why_not():
                return {"failed": why_not}
            places, hosts, way = stack.enter_context(_hosts(args.agents, server, folder))
        else:
            places, hosts, way = [HERE] * args.agents, [], server.target
        port = free_port()
        if backend.startswith("c10d"):
            way = f"{places[-1].address}:{port}"
        elif backend == EMBEDDED:
            way = ",".join(f"{place.address}:{port}" for place in places)
            conf.update(embed="1", embed_grace="5")
        elif backend == SUPERVISED:
            conf.update(in_process="1")
        workers = 2 if backend == SUPERVISED else 1
        job_options = JobOptions(backend, way, nnodes, workers=workers, conf=conf)
        job = stack.enter_context(TracedJob(job_options, folder))
        try:
            agents, host = _start(job, case, places, binary)
            job.await_steps(agents, after_s=0.0, limit_s=START_LIMIT_S, steps=_SETTLED_STEPS)
        except JobError as error:
            return {"failed": f"start: {results.failure(error)}"}
        if case in _SILENT:
            time.sleep(args.lease_ttl)  # see _hosts
        cables = dict(zip(agents, hosts, strict=False))
        with _watched(job) if backend in _OURS else contextlib.nullcontext() as events:
            try:
                event_s, running, victim = _hurt(case, job, agents, host, server, cables)
                job.await_steps(running, after_s=event_s, limit_s=args.limit)
            except JobError as error:
                return {"failed": results.failure(error)}
            seen = {} if events is None or case in NOBODY_LOST else _loss_known(events, event_s)
        return {**phases(running, event_s), **seen, "victim": victim}


@contextlib.contextmanager
def _hosts(
    count: int, server: BenchmarkEtcd, folder: Path
) -> Iterator[tuple[list[Place], list[netns.Host], str]]:
    """Hosts that reach each other and etcd: places on them, the hosts, and etcd's endpoint there.

    Only on a host of its own can an agent fall silent: otherwise its kernel goes on answering. The
    job works for a lease first: until then a leader of ours cannot know that there was no outage of
    etcd just before it came, and waits for the lease.
    """
    with contextlib.ExitStack() as stack:
        network = netns.Network(folder)
        stack.callback(network.close)
        address, _, port = server.target.rpartition(":")
        bridge = stack.enter_context(FaultBridge((address, int(port)), host=network.gateway))
        hosts = [network.add_host() for _ in range(count)]
        yield [Place(host.address, host.enter) for host in hosts], hosts, bridge.target


@contextlib.contextmanager
def _watched(job: TracedJob) -> Iterator[JobEvents]:
    """Watch a job of ours from outside: one more watch for etcd, and nothing for the agents."""
    with (
        rdzv_etcd.observe(job.options.endpoint, job=job.options.run_id) as observer,
        observer.events() as events,
    ):
        yield events


def _loss_known(events: JobEvents, event_s: float) -> dict[str, float]:
    """Return after how long the victim was out: declared lost, or known to have left."""
    while (event := events.next(timeout_s=0)) is not None:
        if isinstance(event, rdzv_etcd.NodeLost | rdzv_etcd.NodeLeft) and event.at_s > event_s:
            return {"loss_known": event.at_s - event_s}
    return {}


def _start(
    job: TracedJob, case: str, places: Sequence[Place], binary: EtcdBinary
) -> tuple[list[TracedAgent], TracedAgent | None]:
    """Start the agents; return them and the one that hosts c10d's store.

    c10d gives rank 0 to the lowest process id, so its host is started last: as far as possible each
    case kills one role, not two.
    """
    count = len(places) - 1 if case == "node-added" else len(places)
    names = list(string.ascii_lowercase[:count])
    is_c10d = job.options.is_c10d
    agents = []
    for name, place in zip(names, places, strict=False):
        conf = {"is_host": str(name == names[-1]).lower()} if is_c10d else {}
        env = {} if place is HERE else {"GLOO_SOCKET_IFNAME": netns.DEVICE}
        if job.options.backend == EMBEDDED:
            env.update(RDZV_ETCD_BINARY=str(binary.path), TMPDIR=str(job.folder))
        agents.append(job.start(name, conf=conf, place=place, env=env))
    return agents, agents[-1] if is_c10d else None


def _hurt(
    case: str,
    job: TracedJob,
    agents: list[TracedAgent],
    host: TracedAgent | None,
    server: BenchmarkEtcd,
    cables: Mapping[TracedAgent, netns.Host],
) -> tuple[float, list[TracedAgent], dict[str, Any]]:
    """Do what the case says; return the moment, who works on, and what the victim was."""
    if case == "node-added":
        conf = {"is_host": "false"} if job.options.is_c10d else {}
        added = job.start("added", conf=conf)
        event_s = job.await_note(added, "rendezvous_begin", START_LIMIT_S)
        return event_s, [*agents, added], {}
    leader = _leader(job, agents, server)
    rank0 = next(agent for agent in agents if agent.rank() == 0)
    plain = [agent for agent in agents if agent not in (host, leader, rank0)]
    victims: dict[str, Callable[[], TracedAgent | None]] = {
        "rank0": lambda: rank0,
        "leader": lambda: leader,
        **{each: lambda: host or plain[0] for each in WITH_ITS_STORE},
    }
    victim = victims.get(case, lambda: plain[0])()
    if victim is None:
        raise JobError(f"nobody is {case}")
    was = {
        "rank": victim.rank(),
        "leads": victim is leader,
        "hosts": case in WITH_ITS_STORE or victim is host,
    }
    actions = {"sigterm": victim.terminate, "worker-crash": victim.kill_worker}
    if case in _SILENT:
        victim.expected_to_end = True  # it reaches nobody
        event_s = time.monotonic()
        cables[victim].cut()
    elif case == "store-host":
        victim.expected_to_end = True
        event_s = netns.lose(cables[victim])
    else:
        event_s = actions.get(case, victim.kill)()
    goes_on = case == "worker-crash" and job.options.backend != SUPERVISED
    running = agents if goes_on else [a for a in agents if a is not victim]
    return event_s, running, was


def _leader(job: TracedJob, agents: list[TracedAgent], server: BenchmarkEtcd) -> TracedAgent | None:
    """Return etcd3's leader: its node id has the node's process id in the middle."""
    found = server.keys(f"/rdzv_etcd/{job.options.run_id}/ctl/leader".encode())
    for value in found.values():
        pid = int(json.loads(value)["node"].split("~")[1])
        return next((agent for agent in agents if pid in agent.pids()), None)
    return None


def summarize(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return per case and backend the median of each phase, and why it failed if it did."""
    summary = {}
    for key, samples in results.grouped(document["results"], "case", "backend").items():
        good = [sample for sample in samples if "failed" not in sample]
        row: dict[str, Any] = {
            "runs": len(samples),
            "failures": [sample["failed"] for sample in samples if "failed" in sample],
            "no_restart_used": None,
            "most_restarts": 0,
        }
        if all("restarts" in sample for sample in good):
            row["no_restart_used"] = sum(sample["restarts"] == 0 for sample in good)
            row["most_restarts"] = max((sample["restarts"] for sample in good), default=0)
        for name in (*PHASES, "new_ranks", "total"):
            if good:
                row[name] = results.statistics([sample[name] for sample in good])["median"]
        summary[key] = row
    return summary
