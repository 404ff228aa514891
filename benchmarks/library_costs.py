"""What a group costs: threads and connections of its process, and what it asks of etcd.

    python -m benchmarks.library_costs http://127.0.0.1:2379 --nodes 4 --idle 30

Use an etcd that nobody else uses: what it has done is told by its own metrics, all clients
together. Each node is a process of its own. The figures are in docs/library.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import psutil

import rdzv_etcd

COUNTED = {
    "etcd_server_proposals_committed_total": "writes",
    'grpc_server_msg_received_total{grpc_method="LeaseKeepAlive"': "renewals",
    'grpc_server_msg_received_total{grpc_method="Range"': "reads",
}
TIMES = 20
"""How often a step is done; the mean of that is shown."""


def asked_of_etcd(endpoint: str) -> Counter[str]:
    """What etcd has done since it was started."""
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        for metric, name in COUNTED.items():
            if line.startswith(metric):
                found[name] += int(float(line.rpartition(" ")[2]))
    return found


def node(pipe: Connection, endpoint: str, job: str, nodes: int) -> None:
    """One node, which does what it is told."""
    threads = psutil.Process().num_threads()
    with rdzv_etcd.connect(endpoint, job=job, nodes=nodes, local_addr="127.0.0.1") as group:
        world = group.join()
        steps: dict[str, Callable[[], object]] = {
            "join": lambda: None,
            "an exchange": lambda: world.exchange(b"10.0.0.7:9000"),
            "a barrier": lambda: world.barrier("here"),
            "a set in the store": lambda: world.store.set("key", b"value"),
            "members, the first time": lambda: world.members,
        }
        while (step := pipe.recv()) is not None:
            if step == "cost":
                here = psutil.Process()
                connected = [
                    it for it in here.net_connections("tcp") if it.status == psutil.CONN_ESTABLISHED
                ]
                to_etcd = sum(endpoint.endswith(f":{it.raddr.port}") for it in connected)
                pipe.send((here.num_threads() - threads, to_etcd, len(connected) - to_etcd))
            else:
                pipe.send(steps[step]())


def main() -> None:
    parser = argparse.ArgumentParser(description="What a group costs.")
    parser.add_argument("endpoint", help="of an etcd that nobody else uses: http://host:port")
    parser.add_argument("--nodes", type=int, default=4, help="members of the group")
    parser.add_argument(
        "--idle", type=float, default=30.0, metavar="SECONDS", help="of idleness to observe"
    )
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    job = f"costs-{time.time_ns()}"
    with ExitStack() as stack:
        pipes = []
        before = asked_of_etcd(args.endpoint)

        def tell(what: str, per: float, unit: str) -> None:
            nonlocal before
            now = asked_of_etcd(args.endpoint)
            counts = ", ".join(f"{(now - before)[it] / per:.2f} {it}" for it in COUNTED.values())
            print(f"{what}: {counts} {unit}")
            before = now

        for _ in range(args.nodes):
            mine, its = context.Pipe()
            process = context.Process(target=node, args=(its, args.endpoint, job, args.nodes))
            process.start()
            pipes.append(mine)
            stack.callback(process.join)

        def do(step: str) -> list[Any]:
            for pipe in pipes:
                pipe.send(step)
            return [pipe.recv() for pipe in pipes]

        do("join")
        tell("connecting and forming a world", args.nodes, "per node")
        time.sleep(args.idle)  # nothing happens: that is what is measured
        tell("a world at rest", args.nodes * args.idle, "per node and second")
        for step in ("an exchange", "a barrier", "a set in the store"):
            for _ in range(TIMES):
                do(step)
            tell(step, args.nodes * TIMES, "per node")
        do("members, the first time")
        tell("members, the first time", args.nodes, "per node")
        for threads, to_etcd, to_others in do("cost"):
            print(f"threads {threads}, connections to etcd {to_etcd}, others {to_others}")
        for pipe in pipes:
            pipe.send(None)
    tell("leaving", args.nodes, "per node")


if __name__ == "__main__":
    main()
