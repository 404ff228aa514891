"""A node that looks at itself: what its process costs before and after it has a backend.

Imports nothing that it measures at module level.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil

WATCHED = ("rdzv_etcd", "grpc", "google", "etcd3", "etcd", "tenacity")
"""Packages that a backend may bring along."""

_OWN_MODULES = {
    "etcd3": ("rdzv_etcd.torch_plugin.handler", "rdzv_etcd.etcd.client"),
    "c10d": ("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",),
    "etcd-v2": ("torch.distributed.elastic.rendezvous.etcd_rendezvous_backend",),
    "etcd": ("torch.distributed.elastic.rendezvous.etcd_rendezvous",),
}
NONE = "none"
"""No backend at all: what the process and the polling loop cost by themselves."""


def footprint() -> dict[str, Any]:
    """Return this process's memory and threads, now."""
    process = psutil.Process()
    memory = process.memory_full_info()
    return {
        "rss_mb": memory.rss / 1e6,
        "uss_mb": memory.uss / 1e6,
        "threads": process.num_threads(),
    }


def timed_import(*modules: str) -> float:
    begin_s = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    return time.perf_counter() - begin_s


@dataclass
class AgentProbe:
    """The shape of an agent: torchrun's imports, a handler, a round, then polling."""

    backend: str
    endpoint: str
    job: str
    nodes: int
    poll_s: float
    idle_s: float
    embeds: str | None
    """The etcd that it starts, if it is to."""
    index: int
    handler: Any = None

    def prepare(self) -> None:
        self.stages: dict[str, Any] = {
            "torch_import_s": timed_import("torch.distributed.run"),
            "before": footprint(),
        }
        if self.backend == NONE:
            return
        self.stages["import_s"] = timed_import(*_OWN_MODULES[self.backend])
        self.stages["imported"] = footprint()
        rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
        registry = importlib.import_module("torch.distributed.elastic.rendezvous.registry")
        config: dict[str, str] = {"timeout": "900"}
        if self.backend == "c10d":
            config["is_host"] = "true" if self.index == 0 else "false"
        if self.embeds is not None:
            os.environ["RDZV_ETCD_BINARY"] = self.embeds
            config |= {"embed": "1", "embed_grace": "5"}
        begin_s = time.perf_counter()
        self.handler = registry.get_rendezvous_handler(
            rendezvous.RendezvousParameters(
                self.backend, self.endpoint, self.job, self.nodes, self.nodes, "127.0.0.1", **config
            )
        )
        self.stages["handler_s"] = time.perf_counter() - begin_s
        self.stages["handler"] = footprint()

    def run(self) -> dict[str, Any]:
        if self.handler is not None:
            self.info = self.handler.next_rendezvous()
        self.stages["round"] = footprint()
        return {}

    def idle(self) -> None:
        """Look at the waiting nodes as the agent's loop does."""
        used_before = time.process_time()
        begin_s = now_s = time.monotonic()
        while now_s < begin_s + self.idle_s:
            time.sleep(self.poll_s)
            if self.handler is not None and self.handler.num_nodes_waiting():
                raise RuntimeError("somebody waits in an idle job")
            now_s = time.monotonic()
        used_s = time.process_time() - used_before
        self.stages["idle_cpu_percent"] = 100 * used_s / (now_s - begin_s)
        self.stages["idle"] = footprint()

    def tell(self) -> dict[str, Any]:
        return {"index": self.index, **self.stages}

    def finish(self) -> None:
        if self.handler is not None:
            self.handler.shutdown()


@dataclass
class WorkerProbe:
    """A worker: it imports torch.distributed and torch's rendezvous, which loads entry points."""

    with_plugin: bool
    index: int

    def prepare(self) -> None:
        if not self.with_plugin:
            _hide_plugins()
        self.seconds = timed_import("torch.distributed", "torch.distributed.elastic.rendezvous")

    def run(self) -> dict[str, Any]:
        loaded = sorted(name for name in sys.modules if name.split(".")[0] in WATCHED)
        return {"import_s": self.seconds, **footprint(), "modules": loaded}

    def finish(self) -> None:
        """There is nothing to tidy up."""


def _hide_plugins() -> None:
    """Let torch find no plugin, as if none was installed. It imports the function by its name."""
    metadata = importlib.import_module("importlib.metadata")
    find = metadata.entry_points

    def entry_points(**wanted: Any) -> Any:
        if wanted.get("group") == "torchrun.handlers":
            return metadata.EntryPoints(())
        return find(**wanted)

    metadata.entry_points = entry_points  # type: ignore[attr-defined]
