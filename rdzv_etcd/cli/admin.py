"""The command ``close``; and what all commands share that change a job.

Each asks, or takes ``--yes``, and writes in guarded transactions.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
import time

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.jobs import connected
from rdzv_etcd.cli.options import JobTarget, common, yes_option
from rdzv_etcd.cli.output import RefusedError, ago
from rdzv_etcd.errors import OutcomeUnknownError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.names import display_name
from rdzv_etcd.node.leave import put_closed_marker
from rdzv_etcd.node.views import read_pages
from rdzv_etcd.protocol.describe import closed_text, names_in
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Closure
from rdzv_etcd.protocol.views import control_from
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import many, shown

_REASON = 500


def operator() -> str:
    """Return the name under which this user acts, as nodes show it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "operator"
    return shown(f"{user}@{socket.gethostname()}", 255).replace("~", "-").replace("/", "-")


async def find_node(etcd: Etcd, keys: JobKeys, name: str) -> str:
    """Return the id of the one node that a host name, or a whole id, means.

    Raises RefusedError, EtcdError.
    """
    kvs = (await read_pages(etcd, keys.nodes, keys_only=True)).kvs
    there = sorted(keys.node_id(kv.key) for kv in kvs)
    named = [each for each in there if each == name or display_name(each) == name]
    named = named or [each for each in there if each.startswith(f"{name}~")]
    if len(named) == 1:
        return named[0]
    if named:
        raise RefusedError(f"{name!r} names {len(named)} nodes: {', '.join(named[:8])}")
    hint = f"there are {', '.join(there[:8])}" if there else "no node is there"
    raise RefusedError(f"no node {name!r} in job {keys.job_id!r} under {keys.prefix}: {hint}")


@click.command()
@click.argument("job", required=False)
@click.option("--reason", default="closed by an operator", help="Reason, shown to the nodes.")
@click.option("--succeeded", is_flag=True, help="The work is done; spares exit with code 0.")
@yes_option
@common
def close(*, job: str | None, reason: str, succeeded: bool, yes: bool, target: JobTarget) -> int:
    """Close JOB on all nodes, as failed unless --succeeded is given.

    \b
    Exit code: 0 it is closed, 1 it was not, 3 etcd cannot be asked.
    """
    settings = target.settings(target.job(job))
    closure = Closure(operator(), shown(reason, _REASON), succeeded, time.time())
    asyncio.run(_close(settings, closure, yes))
    job_id, by = settings.job_id, closure.by
    output.show_result(
        "closed",
        {"job": job_id, "by": by, "reason": closure.reason, "succeeded": succeeded},
        f"job {job_id!r} is closed: {closure.reason}",
        as_json=target.as_json,
    )
    return output.DONE


async def _close(settings: Settings, closure: Closure, yes: bool) -> None:
    keys = JobKeys(settings.prefix, settings.job_id)
    job = f"job {settings.job_id!r}"
    async with connected(settings) as etcd:
        control = control_from(keys, await etcd.get(keys.control.read()))
        if control.closure is not None:
            how = closed_text(control.closure, ago(control.closure.wall_s), names_in(control))
            raise RefusedError(f"{job} {how}")
        if control.formed is None:
            raise RefusedError(
                f"{job} has no formed round under {settings.prefix}, so there is nothing to close; "
                "stop the nodes that wait for one"
            )
        count = (await etcd.get(keys.nodes.read(count_only=True))).count
        output.confirm(f"Close {job} ({many(count, 'node')})?", yes=yes)
        try:
            result, _ = await put_closed_marker(etcd, settings, control, closure)
        except OutcomeUnknownError:
            if control_from(keys, await etcd.get(keys.control.read())).closure == closure:
                return
            raise
        if not result.succeeded:
            raise RefusedError(f"not closed: {job} formed a new round just now; try again")
