"""Handlers for tests, made as torchrun makes them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler, create_handler
from tests.library.nodes import LIMIT_S, Job, Server, at_once

QUICK = {"lease_ttl": 3, "settle": 0.1, "last_call_timeout": 30, "join_timeout": LIMIT_S}


def parameters(
    server: Server | str, job_id: str, nodes: str, **config: object
) -> RendezvousParameters:
    """``nodes`` is ``min:max`` or one number; ``config`` is ``--rdzv-conf``."""
    lowest, _, highest = nodes.partition(":")
    endpoint = server if isinstance(server, str) else server.endpoint
    options: dict[str, Any] = {**QUICK, "closed_ttl": 5, "ended_ttl": 5, **config}
    # torchrun passes every value of --rdzv-conf as text
    text = {name: str(value) for name, value in options.items()}
    return RendezvousParameters(
        "etcd3", endpoint, job_id, int(lowest), int(highest or lowest), "127.0.0.1", **text
    )


@contextmanager
def handlers(
    server: Server | str, job_id: str, nodes: str, count: int, **config: object
) -> Iterator[list[EtcdRendezvousHandler]]:
    """``count`` handlers in this process; their nodes just leave in the end."""
    made: list[EtcdRendezvousHandler] = []
    try:
        for _ in range(count):
            made.append(create_handler(parameters(server, job_id, nodes, **config)))
        yield made
    finally:
        for handler in made:
            leave(handler)


class PluginJob(Job):
    """A job that is one test's own, whose nodes are handlers."""

    def parameters(self, nodes: str = "1", **config: object) -> RendezvousParameters:
        return parameters(self.server, self.id, nodes, **config)

    def handler(self, nodes: str = "1", **config: object) -> EtcdRendezvousHandler:
        return create_handler(self.parameters(nodes, **config))

    @contextmanager
    def handlers(
        self, count: int, nodes: str = "", **config: object
    ) -> Iterator[list[EtcdRendezvousHandler]]:
        """So many handlers in this process; their nodes just leave in the end."""
        with handlers(self.server, self.id, nodes or str(count), count, **config) as made:
            yield made


def leave(handler: EtcdRendezvousHandler) -> None:
    """Go as an agent does that was told to stop: without closing the job."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        handler.shutdown()


def join_all(made: Sequence[EtcdRendezvousHandler]) -> list[RendezvousInfo]:
    """Let all join at the same time."""
    infos: list[RendezvousInfo] = at_once([handler.next_rendezvous for handler in made])
    return infos


def run_program(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program from a file: processes that it spawns import it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        return subprocess.run(
            [sys.executable, path, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
            check=False,
            capture_output=True,
            text=True,
            timeout=10 * LIMIT_S,
        )
