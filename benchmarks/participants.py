"""One node of a round for each of torchrun's backends: its real handler, made as torchrun does.

Knows torch's handlers; the floor below them is in :mod:`benchmarks.bare`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

V2_BACKENDS = ("etcd-v2", "etcd")
"""torch's own; they need etcd's v2 API."""
BACKENDS = ("etcd3", "c10d", *V2_BACKENDS)


@dataclass
class HandlerNode:
    """A node with a ``RendezvousHandler``. Node 0 hosts the store if the backend needs one."""

    backend: str
    endpoint: str
    job: str
    nodes: int
    index: int
    _handler: RendezvousHandler | None = None
    _calls: dict[str, int] = field(default_factory=dict)

    def prepare(self) -> None:
        config: dict[str, Any] = {"timeout": "900"}  # as torchrun gives it
        if self.backend == "c10d":
            config["is_host"] = "true" if self.index == 0 else "false"
            self._calls = _count_c10d_calls()
        parameters = RendezvousParameters(
            self.backend, self.endpoint, self.job, self.nodes, self.nodes, "127.0.0.1", **config
        )
        self._handler = get_rendezvous_handler(parameters)

    def run(self) -> dict[str, Any]:
        assert self._handler is not None
        info = self._handler.next_rendezvous()
        if info.world_size != self.nodes:
            raise RuntimeError(f"a world of {info.world_size} instead of {self.nodes}")
        return {"rank": info.rank, **self._calls}

    def finish(self) -> None:
        assert self._handler is not None
        self._handler.shutdown()


def _count_c10d_calls() -> dict[str, int]:
    """Count the calls of c10d's backend on its store, and its compares that failed.

    Its store has no counters of its own. Each call is one request.
    """
    calls = {"c10d_requests": 0, "c10d_failed_compares": 0}
    get_state, set_state = C10dRendezvousBackend.get_state, C10dRendezvousBackend.set_state

    def counted_get(self: C10dRendezvousBackend) -> Any:
        calls["c10d_requests"] += 1
        return get_state(self)

    def counted_set(self: C10dRendezvousBackend, *args: Any) -> Any:
        calls["c10d_requests"] += 1
        answer = set_state(self, *args)
        calls["c10d_failed_compares"] += answer is None or not answer[2]
        return answer

    C10dRendezvousBackend.get_state = counted_get  # type: ignore[method-assign]
    C10dRendezvousBackend.set_state = counted_set  # type: ignore[method-assign, assignment]
    return calls
