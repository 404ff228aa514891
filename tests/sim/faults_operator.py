"""What operators and strangers do to an etcd that works: revoke, delete, restore, write nonsense.

Everything here is undone by the end of the phase of faults, as far as it can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.port import Delete, Put, Txn, prefix_end
from rdzv_etcd.node.leave import request_drain
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing import SimClock
from tests.sim.commits import FOREIGN, OPERATOR
from tests.sim.stage import Part, Stage
from tests.sim.world import SimNode
from tests.support.roles import Lack, forbidding

HOSTILE = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[" * 5000,
    b'{"v": 99}',
    json.dumps({"v": values.VERSION, "note": "x" * 100_000}).encode(),
)
"""Values that nobody can use, whatever the key."""


class OperatorFaults(Part):
    """Each public method is one fault, begun now; what it undoes, it undoes beside."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._written: set[bytes] = set()
        """Keys that hold a stranger's value."""

    def ask_to_leave(self) -> None:
        """A node does as it is asked, as soon as it has heard of it."""
        for node in self._stage.one():
            self._stage.later(self._asked(node))

    async def _asked(self, node: SimNode) -> None:
        job, stage = self._job, self._stage
        asking = job.server.connect(OPERATOR)
        with contextlib.suppress(EtcdError):
            clock = SimClock(job.loop)
            if await request_drain(asking, job.keys, clock, node.node_id, "maintenance"):
                stage.asked.append(node)
                stage.note(f"{node.name} is asked to leave")
        await asking.close()

        def is_settled() -> bool:
            return node not in stage.asked or not node.alive or stage.calm

        await job.until(lambda: is_settled() or node.node.drain is not None, "it hears", 1e6)
        if node in stage.asked and node.alive and node.node.drain:
            await job.leave(node.name, "drained")

    def revoke_all(self) -> None:
        self._stage.forget_asked()
        if self._job.server.up:
            self._job.revoke(sorted(self._job.server.leases()))

    def extend_leases(self) -> None:
        if self._job.server.up:
            self._job.server.extend_leases()

    def delete_a_presence(self) -> None:
        nodes = self._job.keys.nodes
        here = [kv.key for kv in self._job.server.snapshot(nodes.start)]
        if here:
            self._delete(Delete(self._rng.choice(here)))

    def delete_a_control_key(self) -> None:
        keys = self._job.keys
        self._delete(Delete(self._rng.choice([keys.round, keys.leader, keys.change])))

    def delete_everything(self) -> None:
        """``etcdctl del --prefix``: the leases live on, with nothing on them."""
        self._stage.forget_asked()
        root = self._job.keys.root
        self._delete(Delete(root, root[:-1] + bytes([root[-1] + 1])))

    def restore_a_backup(self) -> None:
        self._stage.later(self._restore(self._rng.uniform(3.0, 90.0)))

    def lose_the_tail(self) -> None:
        """A new cluster is made of a member that lagged behind."""
        self._stage.later(self._restore(self._rng.choice([0.0, 0.05, 0.5, 3.0])))

    async def _restore(self, age_s: float) -> None:
        saved, written = self._job.save(), sorted(self._written)
        await asyncio.sleep(age_s)
        bump_revision = self._rng.choice([0, 0, 1_000_000])
        self._stage.forget_asked()
        self._job.restore(saved, bump_revision=bump_revision)
        for key in written:  # what an operator had cleared up may be there again
            self._clear_later(key)

    def lose_data_between_runs(self) -> None:
        """Drawn as a kind; what it means is up to the life's end."""

    def write_nonsense(self) -> None:
        """Under the key of a stranger, or in the place of what a node has put there."""
        keys = self._job.keys
        control = [keys.round, keys.leader, keys.change, keys.ended, keys.epoch]
        here = [kv.key for kv in self._job.server.snapshot(keys.nodes.start)][:1]
        key = self._rng.choice([keys.node("stranger~1~x")] * 3 + control + here)
        value = self._rng.choice([*HOSTILE, *map(str.encode, _presences(self._job.settings.job))])
        if not self._job.server.up or self._job.server.model.no_space:
            return
        self._job.server.apply(Txn((), (Put(key, value),)), FOREIGN)
        self._clear_later(key)

    def overwrite_a_slice(self) -> None:
        """Of a large world: whoever was in it puts it back when a leader has to read it."""
        prefix = self._job.keys.ranks.start
        here = [kv.key for kv in self._job.server.snapshot(prefix)]
        if here and self._job.server.up and not self._job.server.model.no_space:
            put = Put(self._rng.choice(here), self._rng.choice(HOSTILE))
            self._job.server.apply(Txn((), (put,)), FOREIGN)

    def edit_the_role(self) -> None:
        """Everybody's user may not read or write some keys for a while."""
        keys = self._job.keys
        ranges: list[tuple[bytes, bytes | None]]
        ranges = [(key, None) for key in (keys.round, keys.leader, keys.change, keys.ended)]
        ranges += [(each.start, each.end) for each in (keys.nodes, keys.control, keys.ranks)]
        ranges.append((keys.root, prefix_end(keys.root)))
        reads, writes = self._rng.choice([(True, True), (True, False), (False, True)])
        lack = Lack(*self._rng.choice(ranges), reads, writes, self._rng.random() < 0.5)
        self._stage.note(f"the role lacks {lack}")
        duration_s = self._rng.choice([2.0, self._rng.uniform(0, 6 * self._plan.ttl_s)])
        self._stage.later(self._without(lack, duration_s))

    async def _without(self, lack: Lack, duration_s: float) -> None:
        server = self._job.server
        match = forbidding(server, lack)
        server.forbidden.append(match)
        await asyncio.sleep(duration_s)
        if match in server.forbidden:  # everything was healed meanwhile
            server.forbidden.remove(match)

    def _clear_later(self, key: bytes) -> None:
        self._written.add(key)
        self._stage.later(self._cleared(key, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    async def _cleared(self, key: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self._job.server.up:
            self._stage.later(self._cleared(key, 1.0))
        elif key in self._written:
            self._written.discard(key)
            self._delete(Delete(key))

    def _delete(self, op: Delete) -> None:
        if self._job.server.up:
            self._job.server.apply(Txn((), (op,)), OPERATOR)


def _presences(job: JobSettings) -> list[str]:
    """Presences in the right form, with fields that no node would have."""
    good = {
        "v": values.VERSION,
        "address": "10.9.9.9",
        "port": 29500,
        "arrived_for": 1,
        "settings": {
            "min_nodes": job.min_nodes,
            "max_nodes": job.max_nodes,
            "node_unit": job.node_unit,
        },
    }
    bad: list[dict[str, object]] = [
        {"epoch_seen": 2**63 - 1},
        {"arrived_for": 2**63 - 1},
        {"port": 2**40},
        {"rank_key": "9" * 5000},
        {"address": "\ud800"},
        {"settings": {"min_nodes": 1, "max_nodes": 10**30, "node_unit": 1}},
    ]
    return [json.dumps({**good, **fields}) for fields in bad]
