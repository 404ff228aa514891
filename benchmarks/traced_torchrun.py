"""torchrun itself, with the moments at which its agent stops, joins and starts written to a file.

The same for every backend: it wraps three methods of torch's agent and changes nothing, and one of
torch's own rendezvous, which says when it has found a node dead. Moments are ``time.monotonic()``,
one clock for all processes of a machine. First argument: the trace file; all others are torchrun's.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _BackendRendezvousStateHolder
from torch.distributed.run import main

TRACED = (
    (LocalElasticAgent, "_stop_workers", "stop"),
    (SimpleElasticAgent, "_rendezvous", "rendezvous"),
    (LocalElasticAgent, "_start_workers", "start"),
)


def trace(path: Path) -> None:
    log = path.open("a", buffering=1)

    def note(event: str, rank: int | None) -> None:
        log.write(json.dumps({"event": event, "time": time.monotonic(), "rank": rank}) + "\n")

    for owner, name, event in TRACED:
        setattr(owner, name, _wrapped(getattr(owner, name), event, note))


def trace_losses(path: Path) -> None:
    """Note when torch's own ``c10d`` or ``etcd-v2`` has found that a node's heartbeats ended."""
    log = path.open("a", buffering=1)
    sanitize = _BackendRendezvousStateHolder._sanitize

    @functools.wraps(sanitize)
    def traced(self: _BackendRendezvousStateHolder) -> None:
        sanitize(self)
        if self._dead_nodes:
            line = {"event": "loss_known", "time": time.monotonic(), "rank": None}
            log.write(json.dumps(line) + "\n")

    _BackendRendezvousStateHolder._sanitize = traced  # type: ignore[method-assign]


def _wrapped(
    method: Callable[..., Any], event: str, note: Callable[[str, int | None], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def traced(self: Any, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
        note(f"{event}_begin", None)
        answer = method(self, worker_group, *args, **kwargs)
        note(f"{event}_end", worker_group.group_rank)
        return answer

    return traced


if __name__ == "__main__":
    trace(Path(sys.argv[1]))
    trace_losses(Path(sys.argv[1]))
    main(sys.argv[2:])
