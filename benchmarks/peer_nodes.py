"""One node of a round for each of the other systems, made as its own launcher makes it.

Runs in an environment that has the system (:mod:`benchmarks.peers`). Knows the systems' handlers
and clients, and where they are no public ones, what their launchers call.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from benchmarks.fleet import Participant

_LIMIT = timedelta(seconds=300)


@dataclass
class QuorumNode:
    """A replica group of torchft's that asks its lighthouse for a quorum of all."""

    endpoint: str
    job: str
    nodes: int
    index: int

    def prepare(self) -> None:
        coordination = importlib.import_module("torchft.coordination")
        if self.index == 0:
            self._server = coordination.LighthouseServer(
                bind=self.endpoint, min_replicas=self.nodes
            )
        self._client = coordination.LighthouseClient(f"http://{self.endpoint}", _LIMIT)

    def run(self) -> dict[str, Any]:
        quorum = self._client.quorum(f"{self.index:05d}", _LIMIT, address="", store_address="")
        members = sorted(member.replica_id for member in quorum.participants)
        if len(members) != self.nodes:
            raise RuntimeError(f"a quorum of {len(members)} instead of {self.nodes}")
        return {"rank": members.index(f"{self.index:05d}")}

    def finish(self) -> None:
        if self.index == 0:
            self._server.shutdown()


@dataclass
class _HandlerNode:
    endpoint: str
    job: str
    nodes: int
    index: int

    def prepare(self) -> None:
        self._handler = self._make()

    def _make(self) -> Any:
        raise NotImplementedError

    def run(self) -> dict[str, Any]:
        answer = self._handler.next_rendezvous()
        rank, size = (
            (answer[1], answer[2])
            if isinstance(answer, tuple)
            else (answer.rank, answer.world_size)
        )
        if size != self.nodes:
            raise RuntimeError(f"a world of {size} instead of {self.nodes}")
        return {"rank": rank}

    def finish(self) -> None:
        """Nothing: the processes end at once, and with them what they hold."""

    def _parameters(self, kind: Callable[..., Any], backend: str, **config: object) -> Any:
        is_host = "true" if self.index == 0 else "false"
        where = (self.endpoint, self.job, self.nodes, self.nodes, "127.0.0.1")
        return kind(backend, *where, is_host=is_host, **config)


class LmResiliencyNode(_HandlerNode):
    """An agent of torchrun's with LM Resiliency's backend; each thinks it has a host of its own."""

    def _make(self) -> Any:
        self._folder = tempfile.TemporaryDirectory(prefix="rdzv-bench-lm-")  # its owner's alone
        folder = Path(self._folder.name)
        machine = folder / "machine-id"
        machine.write_text(uuid.uuid4().hex + "\n")
        os.environ["LM_RESILIENCY_MACHINE_ID_PATH"] = str(machine)
        parameters = self._parameters(
            RendezvousParameters,
            "lm_resiliency",
            lm_resiliency_restart_context_path=str(folder / "context.json"),
        )
        # What its entry point names; torch 2.13 calls that without parameters, and does not get it.
        torchrun = importlib.import_module("lm_resiliency.integrations.torchrun")
        return torchrun.create_rendezvous_handler(parameters)

    def finish(self) -> None:
        self._folder.cleanup()


class FtLauncherNode(_HandlerNode):
    """An agent of NVIDIA's ``ft_launcher``, which has a copy of torch's rendezvous."""

    def _make(self) -> Any:
        extension = "nvidia_resiliency_ext.fault_tolerance"
        launcher = importlib.import_module(f"{extension}.launcher")
        launcher._register_ft_rdzv_handler()
        rendezvous = importlib.import_module(f"{extension}._torch_elastic_compat.rendezvous")
        parameters = self._parameters(
            rendezvous.RendezvousParameters,
            "c10d",
            upscaling_enabled=True,  # as its launcher sets it
            timeout="900",
        )
        return launcher.rdzv_registry.get_rendezvous_handler(parameters)


NODES: dict[str, Callable[[str, str, int, int], Participant]] = {
    "torchft": QuorumNode,
    "lm-resiliency": LmResiliencyNode,
    "nvidia-resiliency-ext": FtLauncherNode,
}
