"""``rdzv-etcd drain``: asks a node to leave at a point that costs its world nothing.

The request is a key; :mod:`rdzv_etcd.protocol.world_end` decides which members stop for it. The
node obeys: this command only asks it, and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.admin import find_node, operator
from rdzv_etcd.cli.jobs import connected, read_job, watching
from rdzv_etcd.cli.options import JobTarget, Seconds, common, yes_option
from rdzv_etcd.cli.output import RefusedError
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.node.leave import request_drain
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.events import Joined, NodeLeft, NodeLost
from rdzv_etcd.protocol.job_state import JobState, Role
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Drain
from rdzv_etcd.protocol.views import control_from
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

_BACK_S = 2.0
"""A waiting node whose lease has run out is gone if it has not replaced its session by then."""
_ASK_AGAIN_S = 5.0
"""etcd may lose the request: while somebody waits, it is repeated this often."""


class DrainOutcome(Enum):
    """What became of a node that is being drained."""

    ASKED = "is being drained"
    LEFT = "has left"
    GONE = "is gone, and no world was waiting for it"
    LOST = "was lost before it had left"
    OPEN = "has not left yet; the request stands"


@click.command()
@click.argument("job")
@click.argument("node")
@click.option(
    "--reason", default="no reason given", help="Reason, shown to the node and to the others."
)
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=Seconds(shortest=0.1),
    help="Wait up to SECONDS for it to leave; by default, only record the request.",
)
@yes_option
@common
def drain(
    *, job: str, node: str, reason: str, wait_s: float | None, yes: bool, target: JobTarget
) -> int:
    """Ask NODE of JOB to leave gracefully, at a point that costs the others no work.

    NODE is a host name as `status` shows it, or a whole node id. An agent of torchrun leaves within
    a second or two, a program on the library at its next commit point. The request cannot be taken
    back. It stands until the node has received it, for a day at most.

    \b
    Exit code: 0 the request is recorded (with --wait: the node has left), 1 it is not (with --wait:
    the node has not left, or was lost), 3 etcd cannot be asked.
    """
    settings = target.settings(job)
    node_id, request, outcome, how = asyncio.run(
        _drain(settings, node, reason, wait_s, yes=yes, as_json=target.as_json)
    )
    fate = outcome.name.lower()
    if target.as_json:
        fields = {"job": job, "node": node_id, "by": request.by, "reason": request.reason}
        output.show_json("drain", {**fields, "fate": fate})
    elif outcome is not DrainOutcome.ASKED:
        output.print_line(f"{node_id} {outcome.value}{f': {shown(how)}' if how else ''}")
    is_open = outcome in (DrainOutcome.LOST, DrainOutcome.OPEN)
    return output.NOT_DONE if is_open else output.DONE


async def _drain(
    settings: Settings, node: str, reason: str, wait_s: float | None, *, yes: bool, as_json: bool
) -> tuple[str, Drain, DrainOutcome, str]:
    """Return the node's id, the request that stands, and what became of the node and how.

    Raises RefusedError, EtcdError.
    """
    keys = JobKeys(settings.prefix, settings.job_id)
    async with connected(settings) as etcd:
        node_id = await find_node(etcd, keys, node)
        job = await read_job(etcd, keys, every_node=True)
        if node_id in job.state.unreadable:
            raise RefusedError(f"{node_id} is not a node: {job.state.unreadable[node_id]}")
        follows = what_follows(job.state, node_id)
        was_asked = node_id in job.control.drains
        if not was_asked:
            output.confirm(f"Drain {node_id} from job {settings.job_id!r}? {follows}.", yes=yes)
        ask = partial(request_drain, etcd, keys, SystemClock(), node_id, reason, by=operator())
        async with watching(etcd, keys, settings.connection.request_timeout_s) as events:
            if not await ask():
                raise RefusedError(f"{node_id} has just left, or was found to be dead")
            control = control_from(keys, await etcd.get(keys.control.read()))
            request = control.drains.get(node_id) or Drain(operator(), reason)  # it left at once
            if not as_json:
                verb = "was already being drained" if was_asked else DrainOutcome.ASKED.value
                output.print_line(f"{node_id} {verb} ({why_drained(request, node_id)}). {follows}")
            if wait_s is None:
                return node_id, request, DrainOutcome.ASKED, ""
            is_member = node_id in job.state.members
            outcome, how = await _wait_until_gone(events, node_id, wait_s, ask, is_member=is_member)
            return node_id, request, outcome, how


async def _wait_until_gone(
    events: JobWatch,
    node_id: str,
    wait_s: float,
    ask_again: Callable[[], Awaitable[bool]],
    *,
    is_member: bool,
) -> tuple[DrainOutcome, str]:
    """Wait until a node is gone, and return how. Raises EtcdError."""
    clock = SystemClock()
    end_s = until_s = clock.now_s() + wait_s
    ask_s = clock.now_s() + _ASK_AGAIN_S
    outcome, how = DrainOutcome.OPEN, ""
    while (left_s := until_s - clock.now_s()) > 0:
        event = await events.next(max(0.0, min(left_s, ask_s - clock.now_s())))
        if clock.now_s() >= ask_s:
            with contextlib.suppress(EtcdError):  # etcd may be away for a while
                await ask_again()
            ask_s = clock.now_s() + _ASK_AGAIN_S
        if not isinstance(event, NodeLeft | NodeLost | Joined) or event.node != node_id:
            continue
        if isinstance(event, NodeLeft):
            return DrainOutcome.LEFT, event.reason
        if isinstance(event, Joined):
            outcome, how, until_s = DrainOutcome.OPEN, "", end_s
        elif is_member:
            return DrainOutcome.LOST, event.how
        else:
            outcome, how = DrainOutcome.GONE, event.how
            until_s = min(end_s, clock.now_s() + _BACK_S)
    return outcome, how


def what_follows(state: JobState, node_id: str) -> str:
    """Describe what a node, and the others, will do when it is drained; pure."""
    if state.closure is not None:
        return "The job is closed: it leaves anyway"
    role = next((node.role for node in state.nodes if node.node_id == node_id), None)
    if role not in (Role.MEMBER, Role.FINISHED) or state.settings is None:
        return "It works in no world, and leaves at once"
    text = (
        "torchrun's agent stops its workers and leaves at once, a program on the library at its "
        "next commit point; the others continue without it"
    )
    short = state.settings.min_nodes - (len(state.nodes) - 1)
    if short <= 0:
        return text
    return f"{text} as soon as there are {short} more: the job needs {state.settings.min_nodes}"
