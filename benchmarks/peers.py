"""``peers``: a round of this library and of other systems for training that survives its nodes.

Each of the others gets an environment of its own, made on demand, which sees the packages of this
one. What does not install there is reported as missing. What the systems promise differs: torchft's
lighthouse and the stores of the other two are in the memory of one process, and end with it; here
a round is on disk, on etcd, before anybody goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import sysconfig
import tempfile
import uuid
import venv
from pathlib import Path
from typing import Any

from benchmarks import latency, options, results
from benchmarks.environment import describe
from benchmarks.etcd_server import choose_binary, running_etcd
from benchmarks.fleet import Fleet, FleetError
from benchmarks.peer_nodes import NODES
from benchmarks.recording import recording
from tests.support.processes import free_port

NAME = "peers"
OURS = ("etcd3", latency.BARE, "c10d")
PACKAGES = {
    "torchft": "torchft-nightly",
    "lm-resiliency": "lm-resiliency",
    "nvidia-resiliency-ext": "nvidia-resiliency-ext",
}
SYSTEMS = (*OURS, *PACKAGES)
_INSTALL_LIMIT_S = 600
_ROOT = Path(__file__).parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=options.numbers, default=[2, 8, 32, 64], help="sizes of the world"
    )
    parser.add_argument(
        "--systems", type=options.names(*SYSTEMS), default=list(SYSTEMS), help="what to measure"
    )
    parser.add_argument("--repeat", type=options.count, default=5, help="rounds of each size")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one round")
    parser.add_argument(
        "--environments",
        type=options.folder,
        help="keep the other systems' environments here (default: a temporary folder)",
    )
    options.add_common_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure round-robin, so that a disturbance of the machine hits no system alone."""
    binary = choose_binary(args.etcd)
    rounds = [
        (nodes, repeat, system)
        for nodes in args.nodes
        for repeat in range(args.repeat)
        for system in args.systems
    ]
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-peers-") as temporary:
        folder = args.environments or Path(temporary)
        others = {system: Other(folder / system, system) for system in PACKAGES}
        wanted = [others[system] for system in args.systems if system in others]
        for other in wanted:
            other.install()
        # Only now: it records how busy the machine is.
        environment = describe(etcd_version=binary.version, data=args.data, fsync=args.fsync)
        versions = {other.package: other.version for other in wanted}
        with (
            running_etcd(binary, args.data, fsync=args.fsync) as server,
            recording(args, NAME, {**environment, "peers": versions}, len(rounds)) as record,
        ):
            for nodes, repeat, system in rounds:
                sample: dict[str, Any] = {"backend": system, "nodes": nodes, "repeat": repeat}
                if system in others:
                    sample.update(others[system].measure(nodes, args.limit))
                else:
                    sample.update(latency.measure(system, nodes, server, args.limit, "forkserver"))
                record.add(f"{system}, {nodes} nodes", sample)
    return record.document


class Other:
    """Another system, in an environment of its own."""

    def __init__(self, folder: Path, system: str) -> None:
        self.system = system
        self.package = PACKAGES[system]
        self.version: str | None = None
        self._python = folder / "bin" / "python"
        self._folder = folder
        self._missing: str | None = None

    def install(self) -> None:
        """Make the environment if it is not there. If that fails, every round says why."""
        if not self._python.exists():
            results.console.print(f"installing {self.package}")
            venv.create(self._folder, with_pip=True)
            own, outer = (self._packages(prefix) for prefix in (str(self._folder), None))
            (Path(own) / "outer.pth").write_text(f"{outer}\n")
        command = [str(self._python), "-m", "pip", "install", "--quiet", self.package]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            self._missing = f"{self.package} does not install: {last}"
            return
        ask = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        self.version = subprocess.run(
            [str(self._python), "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()

    @staticmethod
    def _packages(prefix: str | None) -> str:
        known = {} if prefix is None else {"base": prefix, "platbase": prefix}
        return sysconfig.get_path("purelib", vars=known)

    def measure(self, nodes: int, limit_s: float) -> dict[str, Any]:
        """Form one round with fresh processes; return its raw sample."""
        if self._missing is not None:
            return {"failed": self._missing}
        command = [str(self._python), "-m", "benchmarks.peers", self.system]
        try:
            done = subprocess.run(
                [*command, str(nodes), str(limit_s)],
                cwd=_ROOT,
                capture_output=True,
                text=True,
                timeout=3 * limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no end within {3 * limit_s:g} s"}
        if done.returncode:
            error = RuntimeError(f"exit code {done.returncode}\n{done.stderr}")
            return {"failed": results.failure(error)}
        sample: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return sample


def one_round(system: str, nodes: int, limit_s: float) -> dict[str, Any]:
    """Form one round in this environment; return its raw sample."""
    where = (f"127.0.0.1:{free_port()}", f"job-{uuid.uuid4().hex[:8]}")
    make = functools.partial(NODES[system], *where, nodes)
    try:
        with Fleet(make, nodes) as fleet:
            fleet.prepare(limit_s)
            runs = fleet.run(limit_s)
            fleet.finish(limit_s)
    except FleetError as error:
        return {"failed": results.failure(error)}
    return latency.times(runs)


def summarize(document: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return per system and size the statistics of its rounds."""
    summary = {}
    for key, samples in results.grouped(document["results"], "backend", "nodes").items():
        good = [sample["seconds"] for sample in samples if "failed" not in sample]
        row: dict[str, Any] = {"failed": len(samples) - len(good)}
        if good:
            row.update(results.statistics(good))
        summary[key] = row
    return summary


if __name__ == "__main__":
    print(json.dumps(one_round(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
