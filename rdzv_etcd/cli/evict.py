"""``rdzv-etcd evict``: asks, as a peer link does, whether a node lives; if not, it is lost at once.

The accusation replaces the node's presence, on a lease of this command. A node that lives puts its
presence back, and nothing has happened; one that does not is declared lost by the leader.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from enum import Enum

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.admin import find_node, operator
from rdzv_etcd.cli.jobs import connected, watching
from rdzv_etcd.cli.options import JobTarget, Seconds, common, yes_option
from rdzv_etcd.cli.output import RefusedError
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.node.accuse import put_accusation, read_place
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Accusation, Control, NodeInfo
from rdzv_etcd.protocol.views import control_from
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import how_evicted

_SPARE_S = 10
"""How much longer than the wait the accusation's lease lasts, if the command is killed."""
_WITHDRAWAL_S = 3.0
_LOOK_EVERY_S = 2.0
"""If no event comes: an accusation and its answer that arrive together are none."""


class Eviction(Enum):
    """What became of a node that was accused."""

    ANSWERED = "it is alive (it answered); nothing was changed"
    LOST = "it did not answer, and was declared lost"
    GONE = "it did not answer, and has lost its place; no world was waiting for it"
    OPEN = "it did not answer, but no leader has declared it lost yet"


@click.command()
@click.argument("job")
@click.argument("node")
@click.option("--reason", default="", help="Evidence of its death, shown to the others.")
@click.option(
    "--certain",
    is_flag=True,
    help="Its process is known to be gone; the leader need not wait to trust its silence.",
)
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=Seconds(shortest=0.1),
    default=20.0,
    show_default=True,
    help="Wait up to SECONDS for the outcome.",
)
@yes_option
@common
def evict(
    *, job: str, node: str, reason: str, certain: bool, wait_s: float, yes: bool, target: JobTarget
) -> int:
    """Probe NODE of JOB; if it does not respond, declare it lost now instead of waiting for its
    lease.

    NODE is a host name as `status` shows it, or a whole node id. A node that is alive answers and
    continues: no process is ended.

    \b
    Exit code: 0 it is lost, 1 it is alive or the outcome is open, 3 etcd cannot be asked.
    """
    settings = target.settings(job)
    keys = JobKeys(settings.prefix, settings.job_id)
    accusation = Accusation(operator(), how_evicted(operator(), reason), certain)

    async def probe() -> tuple[str, Eviction]:
        async with connected(settings) as etcd:
            node_id = await find_node(etcd, keys, node)
            output.confirm(
                f"Probe {node_id} of job {job!r}, and declare it lost if it does not respond?",
                yes=yes,
            )
            return node_id, await _accuse(etcd, settings, node_id, accusation, wait_s)

    node_id, outcome = asyncio.run(probe())
    output.show_result(
        "evict",
        {"job": job, "node": node_id, "fate": outcome.name.lower()},
        f"{node_id}: {outcome.value}",
        as_json=target.as_json,
    )
    return output.DONE if outcome in (Eviction.LOST, Eviction.GONE) else output.NOT_DONE


async def _accuse(
    etcd: Etcd, settings: Settings, node_id: str, accusation: Accusation, wait_s: float
) -> Eviction:
    """Accuse a node, and return what has become of it within ``wait_s``; the accusation stands all
    the while. Raises RefusedError, EtcdError."""
    keys = JobKeys(settings.prefix, settings.job_id)
    lease = await etcd.grant(math.ceil(wait_s) + _SPARE_S)
    try:
        async with watching(etcd, keys, settings.connection.request_timeout_s) as events:
            at = await _put(etcd, keys, node_id, accusation, lease.lease_id)
            clock = SystemClock()
            until_s = clock.now_s() + wait_s
            outcome = await _look(etcd, keys, node_id, at)
            while outcome is Eviction.OPEN and (left_s := until_s - clock.now_s()) > 0:
                await events.next(min(left_s, _LOOK_EVERY_S))
                outcome = await _look(etcd, keys, node_id, at)
            return outcome
    finally:  # with the lease the accusation goes
        try:
            await etcd.revoke(lease.lease_id, timeout_s=_WITHDRAWAL_S)
        except EtcdError as error:
            output.warn(f"the accusation may stand for {lease.ttl_s:g} s more: {error}")


async def _put(
    etcd: Etcd, keys: JobKeys, node_id: str, accusation: Accusation, lease_id: int
) -> int:
    """Replace the node's presence by the accusation; return its revision."""
    place = await read_place(etcd, keys, node_id)
    if isinstance(place.holds, Accusation):
        raise RefusedError(f"{node_id} has been accused already: {shown(place.holds.how)}")
    if place.kv is None:
        raise RefusedError(f"{node_id} has just left")
    if place.holds is None:
        raise RefusedError(f"{node_id} is not a node")
    accusation = replace(accusation, round_trip_ms=place.holds.round_trip_ms)
    at = await put_accusation(etcd, keys, place.kv, accusation, lease_id)
    if not at:
        raise RefusedError(f"{node_id} has just written its presence: it is alive")
    return at


async def _look(etcd: Etcd, keys: JobKeys, node_id: str, at: int) -> Eviction:
    control = control_from(keys, await etcd.get(keys.control.read()))
    if isinstance((await read_place(etcd, keys, node_id)).holds, NodeInfo):
        return Eviction.ANSWERED
    return judge(control, node_id, at)


def judge(control: Control, node_id: str, at: int) -> Eviction:
    """Decide what became of a node that has not answered since revision ``at``; pure."""
    change, record = control.change, control.round
    if change is not None and control.change_revision > at and change.may_name(node_id):
        return Eviction.LOST
    if record is not None and control.round_revision > at:
        return Eviction.LOST  # the others continued without it
    formed = control.formed
    is_seated = formed is not None and (formed.slices is not None or node_id in formed.members)
    if not is_seated or control.open_change is not None:
        return Eviction.GONE
    return Eviction.OPEN
