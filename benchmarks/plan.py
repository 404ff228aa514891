"""Who is who among the nodes of a ``scale`` run: ids, leases, addresses, who is lost when.

Plain values that every process of a run agrees on without asking. Does nothing.

Processes 0 and 1 hold the *heads*: real nodes of the library (:class:`rdzv_etcd.node.node.Node`)
that lead and take over the lead; the leader has a process of its own, as it has in reality. All
others are simulated, a share of them in each of the other processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
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
    rack_nodes: int = 1
    """Only racks with so many nodes are in a world; 1: each node is by itself."""

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

    def rack(self, index: int) -> str | None:
        """The first rack has those who may lead, as they have the first ranks."""
        return None if self.rack_nodes == 1 else f"rack-{index // self.rack_nodes}"

    def seated(self, gone: Collection[int]) -> frozenset[int]:
        """Return the nodes that hold a rank: those whose racks are complete."""
        here = set(range(self.nodes)).difference(gone)
        rack = self.rack_nodes
        sizes = Counter(index // rack for index in here)
        return frozenset(index for index in here if sizes[index // rack] == rack)

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
        most, rack = len(self.seated(())), self.rack_nodes
        return Settings(
            self.job,
            JobSettings(max(1, most // rack // 2) * rack, most, segment_size=rack),
            self.connection,
            Timing(lease_ttl_s=self.lease_ttl_s),
            domain_key=self.rack(0),
            slice_nodes=self.slice_nodes,
        )

    # -- who is lost ------------------------------------------------------------------------------

    @property
    def lost_alone(self) -> frozenset[int]:
        """One node with a rank in the middle: the highest rank moves into the hole."""
        return frozenset({(self.heads + self.nodes) // 2})

    @property
    def lost_together(self) -> frozenset[int]:
        """Every tenth of the simulated nodes that are there; of racks, all nodes of every tenth."""
        rack = self.rack_nodes
        lost = (index for index in range(self.heads, self.nodes) if index // rack % 10 == 9)
        return frozenset(lost) - self.lost_alone
