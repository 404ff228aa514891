"""Who is who among the nodes of a ``scale`` run: ids, leases, addresses, who is lost when.

Plain values that every process of a run agrees on without asking. Does nothing.

Processes 0 and 1 hold the *heads*: real nodes of the library (:class:`rdzv_etcd.node.node.Node`)
that lead and take over the lead; the leader has a process of its own, as it has in reality. All
others are simulated, a share of them in each of the other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Connection, Endpoint, JobSettings, Settings, Timing

LEADER_PROCESS, SUCCESSORS_PROCESS, FIRST_SIMULATED_PROCESS = range(3)
_LEASES = 0x5CA1E << 32
_STEADY_TTL_S = 3600


@dataclass(frozen=True)
class Plan:
    """One run; picklable."""

    target: str
    job: str
    nodes: int
    heads: int
    """The leader and who may take over from it; they arrive first, so they have the first ranks."""
    processes: int
    """That hold the simulated nodes."""
    connections: int
    """Of each of these processes."""
    lease_ttl_s: int
    slice_nodes: int

    @property
    def size(self) -> int:
        """How many processes there are."""
        return FIRST_SIMULATED_PROCESS + self.processes

    def share(self, process: int) -> Sequence[int]:
        """Return the indices of the nodes in a process."""
        if process == LEADER_PROCESS:
            return range(1)
        if process == SUCCESSORS_PROCESS:
            return range(1, self.heads)
        first = self.heads + process - FIRST_SIMULATED_PROCESS
        return range(first, self.nodes, self.processes)

    def steady_ttl_s(self) -> int:
        """The TTL of simulated nodes' leases: nobody is lost because this machine is busy."""
        return _STEADY_TTL_S

    def node_id(self, index: int) -> str:
        return f"node-{index:05d}.cluster~{10_000 + index}~{index * 2654435761 % 2**32:08x}"

    def lease(self, index: int) -> int:
        return _LEASES + index

    def address(self, index: int) -> str:
        return f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}"

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self.settings.prefix, self.job)

    @property
    def connection(self) -> Connection:
        host, _, port = self.target.rpartition(":")
        return Connection((Endpoint(host, int(port)),))

    @property
    def settings(self) -> Settings:
        """Half of the nodes are enough, so that a loss is followed by a round without the lost."""
        return Settings(
            self.job,
            JobSettings(max(1, self.nodes // 2), self.nodes),
            self.connection,
            Timing(lease_ttl_s=self.lease_ttl_s),
            slice_nodes=self.slice_nodes,
        )

    # -- who is lost ------------------------------------------------------------------------------

    @property
    def lost_alone(self) -> frozenset[int]:
        """One node with a rank in the middle: the highest rank moves into the hole."""
        return frozenset({(self.heads + self.nodes) // 2})

    @property
    def lost_together(self) -> frozenset[int]:
        """Every tenth of the simulated nodes that are there."""
        return frozenset(range(self.heads, self.nodes, 10)) - self.lost_alone
