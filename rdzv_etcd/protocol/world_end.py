"""Decides whether a world is over for its member, why, and what kind of end and loss that was."""

from __future__ import annotations

from rdzv_etcd.protocol.describe import lost_and_left
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Closure, Control, Nodes
from rdzv_etcd.world_change import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
    reason_to_leave,
)


def why_over(member: Member, control: Control, epoch: int) -> WorldChange | None:
    """Return why the world of that epoch is over for this node; ``None`` while it is not."""
    if not member.works_in(epoch):
        return MovedOn(member.why_given_up(epoch))
    if member.closure is not None:
        return end_of(member.closure)
    if member.failure is not None:
        task, error = member.failure
        return Failed(member.node_id, f"its task {task!r} failed: {error}")
    if waiting_count(member, control) == 0:
        return None
    change = control.change
    if member.evicted or change is None or not change.concerns(member.record):
        return Expelled()
    return Expelled() if member.node_id in change.lost else change_of(change)


def waiting_count(member: Member, control: Control) -> int:
    """Whether to stop and to join again, as torch's agent asks: above zero if so.

    The number is that of the nodes that wait or were lost according to the change; 1 when a newer
    round was formed without this node, and when the job failed.
    """
    world = member.record
    if world is None:
        return 0
    if member.evicted:
        return 1
    # The member remembers how its run ended: the marker expires, and a new run's rounds do not
    # concern a node that is still finishing the old one.
    closure = member.closure or control.end_of(world.origin)
    if closure is not None:
        return 0 if closure.succeeded else 1
    change = control.change
    if change is not None and change.concerns(world):  # whatever record there is beside it
        return max(1, change.count)
    if control.round is not None and not control.holds(world):
        # An older record: the view lags behind this node's own write, or etcd went back, and then
        # this world's members put their record into its place.
        return 0 if control.is_behind(world) else 1
    return 0


def should_yield(member: Member, control: Control, epoch: int) -> bool:
    """Whether the members of the world of that epoch should stop at their next commit point,
    because one of them is being drained: until then stopping would cost work."""
    if member.drain is not None and member.works_in(epoch):
        return True  # it may not have been announced yet
    return any(drain.epoch == epoch for drain in control.drains.values())


def is_logged(member: Member, why: WorldChange) -> bool:
    """Whether to log why a node's world is over: not if the node itself ended it, or all its
    members have finished; to a node that has finished only the job's failure matters."""
    return isinstance(why, Failed) or not (
        member.has_finished or isinstance(why, MovedOn | Finished)
    )


def end_of(closure: Closure) -> Finished | Failed:
    """Return why a world is over whose job was closed."""
    return (Finished if closure.succeeded else Failed)(closure.by, closure.reason)


def change_of(change: Change) -> Lost | Left | Waiting:
    """Return why a world is over, as the leader has published it."""
    lost, left = lost_and_left(change.lost)
    if lost:
        return Lost(lost, change.waiters)
    if left:
        return Left(left, change.waiters)
    return Waiting(change.waiters, change.because)


# --- for metrics and audits ----------------------------------------------------------------------


def losses(change: Change, nodes: Nodes, at_s: float) -> dict[str, float | None]:
    """Return the members that a change declares lost, and how many seconds after the end of its
    process each was; ``None`` if no node has seen that end. A change names the first 32 only.

    ``at_s``: when the change was published, by the clock of ``nodes``.
    """
    found: dict[str, float | None] = {}
    for node_id, how in change.lost.items():
        if reason_to_leave(how) is None:  # otherwise it has left
            accused = nodes.accused.get(node_id)
            found[node_id] = None if accused is None else accused.gone_for_s(at_s)
    return found


_ENDS: dict[type[WorldChange], str] = {
    Lost: "lost",
    Left: "left",
    Waiting: "waiting",
    Expelled: "expelled",
    Finished: "finished",
    Failed: "failed",
    MovedOn: "moved_on",
}


def cause_of_end(change: WorldChange) -> str:
    """Name the kind of a world's end."""
    return _ENDS[type(change)]
