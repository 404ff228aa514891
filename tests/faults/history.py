"""The worlds that a job's nodes have entered, and whether they may have. Pure.

The invariants are those of ``tests/sim/history.py`` that show in these worlds; etcd's side of them
is not recorded here, because recording it would need an etcd without faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rdzv_etcd.protocol.member import Seat


class InvariantError(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True)
class Told:
    """A world as one node saw it."""

    node_id: str
    world: Seat


def check_history(told: Sequence[Told], *, min_nodes: int, max_nodes: int) -> None:
    """Raise InvariantError unless every promise was kept; ``told`` has each node's worlds in order.

    Rounds of one job id only, and only of runs that follow each other: epochs grow over all.
    """
    by_epoch: dict[int, Seat] = {}
    last: dict[str, Seat] = {}
    for one in told:
        world, node_id = one.world, one.node_id
        size, members = world.size, world.members
        _demand(min_nodes <= size <= max_nodes, "size", one)
        _demand(len(members) == size == len(set(members)), "members", one)
        _demand(0 <= world.rank < size and members[world.rank] == node_id, "rank", one)
        same = by_epoch.setdefault(world.epoch, world)
        _demand(_shared(same) == _shared(world), f"agreement with {same}", one)
        before = last.get(node_id)
        if before is not None:
            _demand(world.epoch > before.epoch, f"epoch after {before.epoch}", one)
            _demand(world.round > before.round, f"round after {before.round}", one)
        last[node_id] = world
    rounds = [by_epoch[epoch].round for epoch in sorted(by_epoch)]
    if rounds != sorted(set(rounds)):
        raise InvariantError(f"rounds by epoch are {rounds}: a round was formed twice")


def _shared(world: Seat) -> tuple[object, ...]:
    return world.round, world.size, world.members, world.master_address, world.master_port


def _demand(holds: bool, promise: str, told: Told) -> None:
    if not holds:
        raise InvariantError(f"{promise}: {told.node_id} saw {told.world}")
