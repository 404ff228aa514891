"""The floor of ``scale``: the same proposals, reads and watch events with nothing around them.

What a round costs on etcd whoever asks: each node's presence is one guarded put; the leader, told
of all of them by one watch, puts the slices of the ranks and then the record; the record is one
event for each node, which then reads its slice. Plain ``grpc.aio`` calls on ready messages, in the
same processes, over as many connections and streams. There are no retries, deadlines, settings,
keep-alives, leader election, views or checks, and one process has no object per node but its id.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from typing import Any
from zlib import crc32

import grpc.aio

from benchmarks.plan import FIRST_SIMULATED_PROCESS, LEADER_PROCESS
from benchmarks.scale_nodes import ScaleProcess
from benchmarks.streams import watch
from rdzv_etcd.etcd import messages
from rdzv_etcd.protocol.ranks import slices_for

_PRESENCE_BYTES = 250
_SLICES_PER_TXN = 100
_SETUP_AT_ONCE = 64
_ARRIVALS_AT_ONCE = 4000
"""In all processes: etcd refuses requests ("too many requests") while 5,000 proposals wait."""


class BareProcess(ScaleProcess):
    """A leader, or a share of the nodes."""

    async def _prepare(self) -> None:
        plan = self._plan
        self._rpc = rpc = messages.load()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.aio.insecure_channel(plan.target, options=options) for _ in range(plan.connections)
        ]
        self._kv = [rpc.KVStub(channel) for channel in self._channels]
        self._root = f"/bare/{plan.job}/"
        self._record = f"{self._root}round".encode()
        self._reports: list[Any] = []
        self._done = asyncio.Event()
        self._indices = [] if self._process < FIRST_SIMULATED_PROCESS else list(self._members())
        if self._process == LEADER_PROCESS:
            await self._prepare_leader()
        else:
            await self._prepare_members()

    def _members(self) -> range:
        """Return the share of the nodes here: the floor knows no heads."""
        first = self._process - FIRST_SIMULATED_PROCESS
        return range(first, self._plan.nodes, self._plan.processes)

    # -- the leader -------------------------------------------------------------------------------

    async def _prepare_leader(self) -> None:
        self._arrived: list[str] = []
        self._closing: asyncio.Task[None] | None = None
        start = f"{self._root}nodes/".encode()
        self._readers = [await watch(self._channels[0], start, start[:-1] + b"0", self._count)]

    def _count(self, response: Any) -> None:
        for event in response.events:
            self._arrived.append(event.kv.key.decode().rpartition("/")[2])
        if len(self._arrived) == self._plan.nodes:
            self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        rpc = self._rpc
        slices: list[dict[str, int]] = [{} for _ in range(self._slices)]
        for rank, node_id in enumerate(self._arrived):
            slices[crc32(node_id.encode()) % self._slices][node_id] = rank
        puts = [
            rpc.RequestOp(
                request_put=rpc.PutRequest(key=self._slice(i), value=json.dumps(ranks).encode())
            )
            for i, ranks in enumerate(slices)
        ]
        for first in range(0, len(puts), _SLICES_PER_TXN):
            batch = puts[first : first + _SLICES_PER_TXN]
            await self._kv[0].Txn(rpc.TxnRequest(success=batch))
        record = json.dumps({"size": len(self._arrived), "slices": self._slices}).encode()
        await self._put(self._kv[0], self._record, record, 0)

    # -- everybody else ---------------------------------------------------------------------------

    async def _prepare_members(self) -> None:
        plan, rpc = self._plan, self._rpc
        self._readers = []
        self._tasks: set[asyncio.Task[None]] = set()
        gate = asyncio.Semaphore(_SETUP_AT_ONCE)

        async def set_up(number: int, index: int) -> None:
            async with gate:
                channel = self._channels[number % plan.connections]
                leases = rpc.LeaseStub(channel)
                await leases.LeaseGrant(
                    rpc.LeaseGrantRequest(TTL=plan.steady_ttl_s(), ID=plan.lease(index))
                )
                told = functools.partial(self._told, number, index)
                self._readers.append(await watch(channel, self._record, None, told))

        await asyncio.gather(*(set_up(*each) for each in enumerate(self._indices)))

    def run(self) -> dict[str, Any]:
        return self._loop.run(self._arrive_all())

    async def _arrive_all(self) -> dict[str, Any]:
        if self._indices:
            gate = asyncio.Semaphore(_ARRIVALS_AT_ONCE // self._plan.processes)
            await asyncio.gather(*(self._arrive(gate, *each) for each in enumerate(self._indices)))
            await self._done.wait()
        return {"nodes": self._reports, "problems": [], "resigned": 0}

    async def _arrive(self, gate: asyncio.Semaphore, number: int, index: int) -> None:
        node_id = self._plan.node_id(index)
        presence = json.dumps({"id": node_id}).ljust(_PRESENCE_BYTES).encode()
        kv = self._kv[number % len(self._kv)]
        key = f"{self._root}nodes/{node_id}".encode()
        async with gate:
            await self._put(kv, key, presence, self._plan.lease(index))

    def _told(self, number: int, index: int, response: Any) -> None:
        record = json.loads(response.events[0].kv.value)
        epoch = response.events[0].kv.mod_revision
        task = asyncio.ensure_future(self._read_rank(number, index, record, epoch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_rank(self, number: int, index: int, record: Any, epoch: int) -> None:
        node_id = self._plan.node_id(index)
        place = crc32(node_id.encode()) % record["slices"]
        kv = self._kv[number % len(self._kv)]
        answer = await kv.Range(self._rpc.RangeRequest(key=self._slice(place)))
        rank = json.loads(answer.kvs[0].value)[node_id]
        times = (0.0, 0.0, time.monotonic())
        self._reports.append((index, rank, (1, record["size"], epoch, "", 0), times))
        if len(self._reports) == len(self._indices):
            self._done.set()

    # -- both -------------------------------------------------------------------------------------

    @property
    def _slices(self) -> int:
        slices = slices_for(self._plan.nodes, self._plan.slice_nodes, "")
        return 1 if slices is None else slices.count

    def _slice(self, place: int) -> bytes:
        return f"{self._root}ranks/{place:05d}".encode()

    async def _put(self, kv: Any, key: bytes, value: bytes, lease: int) -> None:
        """Put under the guard that no round was formed yet."""
        rpc = self._rpc
        guard = rpc.Compare(
            key=self._record, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=0
        )
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))
        answer = await kv.Txn(rpc.TxnRequest(compare=[guard], success=[put]))
        if not answer.succeeded:
            raise RuntimeError("the guard failed: the round was formed already")
