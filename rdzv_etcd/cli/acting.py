"""Commands that change a job from outside: ``close``, ``reset`` and ``gc``.

Each asks, or takes ``--yes``, and is one guarded transaction (``gc``: one for some keys at a time).
"""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import click

from rdzv_etcd.cli import output
from rdzv_etcd.cli.job_view import connected, jobs_under
from rdzv_etcd.cli.options import Target, common, yes_option
from rdzv_etcd.cli.output import RefusedError
from rdzv_etcd.cli.report import closed_text
from rdzv_etcd.core.model import Closure, Control, Ended, Round
from rdzv_etcd.core.names import display_names
from rdzv_etcd.errors import OutcomeUnknownError
from rdzv_etcd.etcd.api import Etcd, KeyValue
from rdzv_etcd.group.leaving import RUNS_REMEMBERED
from rdzv_etcd.group.pages import read_pages
from rdzv_etcd.schema import inspect_requests
from rdzv_etcd.schema.control import control_from
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.schema.requests import close_job, count_nodes, read_control
from rdzv_etcd.settings import Settings
from rdzv_etcd.text import shown

_REASON = 500
_JOBS = 10_000


def operator() -> str:
    """Who acts, as nodes are told it: a name like a node's."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "operator"
    return shown(f"{user}@{socket.gethostname()}", 255).replace("~", "-").replace("/", "-")


# --- close ----------------------------------------------------------------------------------------


@click.command()
@click.argument("job", required=False)
@click.option("--reason", default="closed by an operator", help="What the nodes are told.")
@click.option("--succeeded", is_flag=True, help="Its work is done: spares end with exit code 0.")
@yes_option
@common
def close(
    *,
    job: str | None,
    reason: str,
    succeeded: bool,
    yes: bool,
    target: Target,
    as_json: bool,
) -> int:
    """End JOB for all its nodes: it has failed, unless --succeeded.

    \b
    Exit code: 0 it is closed, 1 it was not, 3 etcd cannot be asked.
    """
    settings = target.settings(target.job(job))
    closure = Closure(operator(), shown(reason, _REASON), succeeded, time.time())
    asyncio.run(_close(settings, closure, yes))
    if as_json:
        fields = {"job": settings.job_id, "by": closure.by, "reason": closure.reason}
        output.show_json("closed", {**fields, "succeeded": succeeded})
    else:
        output.say(f"job {settings.job_id!r} is closed: {closure.reason}")
    return output.DONE


async def _close(settings: Settings, closure: Closure, yes: bool) -> None:
    keys = JobKeys(settings.prefix, settings.job_id)
    async with connected(settings) as etcd:
        control = _open(settings, control_from(keys, await etcd.get(read_control(keys))))
        record = cast(Round, control.formed)
        count = (await etcd.get(count_nodes(keys))).count
        output.confirm(f"end job {settings.job_id!r}, which has {count} nodes?", yes=yes)
        marker = await etcd.grant(settings.timing.closed_ttl_s)
        kept = await _memory_lease(etcd, settings, control)
        ended = Ended(record.origin, closure, control.epoch)
        txn = close_job(
            keys,
            control,
            replace(record, closure=closure),
            (*control.ended, ended)[-RUNS_REMEMBERED:],
            marker_lease=marker.lease_id,
            ended_lease=kept,
        )
        try:
            result = await etcd.txn(txn)
        except OutcomeUnknownError:
            now = control_from(keys, await etcd.get(read_control(keys)))
            if now.closure == closure:
                return
            raise
        if not result.succeeded:
            await _give_back(etcd, control, marker.lease_id, kept)
            raise RefusedError(
                f"not closed: a round of job {settings.job_id!r} was formed in this moment; do it "
                "again"
            )


def _open(settings: Settings, control: Control) -> Control:
    """Return it if there is a round to close."""
    if control.closure is not None:
        raise RefusedError(f"job {settings.job_id!r} {closed_text(control)}")
    if control.formed is None:
        raise RefusedError(
            f"job {settings.job_id!r} has no formed round under {settings.prefix}, so there is "
            "nothing to close; end the nodes that wait for one"
        )
    return control


async def _memory_lease(etcd: Etcd, settings: Settings, control: Control) -> int:
    """The lease that keeps the memory of ended runs: the one there is, or else a new one."""
    for kept in (control.epoch_lease, control.ended_lease):
        if kept and await etcd.keep_alive(kept):
            return kept
    return (await etcd.grant(settings.timing.ended_ttl_s)).lease_id


async def _give_back(etcd: Etcd, control: Control, *leases: int) -> None:
    for lease_id in {*leases} - {control.epoch_lease, control.ended_lease}:
        await etcd.revoke(lease_id)


# --- reset ----------------------------------------------------------------------------------------


@click.command()
@click.argument("job", required=False)
@click.option("--force", is_flag=True, help="Even beside living nodes, which put their keys back.")
@yes_option
@common
def reset(
    *,
    job: str | None,
    force: bool,
    yes: bool,
    target: Target,
    as_json: bool,
) -> int:
    """Remove all keys of JOB, so that its id is as if never used; not while nodes are there.

    Its epochs begin again, too: checkpoints of earlier runs may have higher ones.

    \b
    Exit code: 0 they are gone, 1 they are not, 3 etcd cannot be asked.
    """
    settings = target.settings(target.job(job))
    removed = asyncio.run(_reset(settings, force, yes))
    if as_json:
        output.show_json("reset", {"job": settings.job_id, "removed": removed})
    else:
        output.say(f"job {settings.job_id!r}: {removed} keys removed")
    return output.DONE


async def _reset(settings: Settings, force: bool, yes: bool) -> int:
    keys = JobKeys(settings.prefix, settings.job_id)
    async with connected(settings) as etcd:
        # In pages: a job's store may be large.
        found = (await read_pages(etcd, keys.all, keys_only=True)).kvs
        living = [kv for kv in found if kv.key in keys.nodes and kv.lease_id]
        if living and not force:
            raise _living(keys, living)
        if not found:
            return 0
        output.confirm(f"remove {len(found)} keys of job {settings.job_id!r}?", yes=yes)
        result = await etcd.txn(inspect_requests.remove_all(keys, force=force), repeatable=True)
        if not result.succeeded:
            again = (await read_pages(etcd, keys.nodes, keys_only=True)).kvs
            raise _living(keys, again)
        return len(found)


def _living(keys: JobKeys, living: Sequence[KeyValue]) -> RefusedError:
    names = display_names([keys.node_id(kv.key) for kv in living])
    return RefusedError(
        f"not done: nodes of job {keys.job_id!r} are there ({names}): end them, or close the job "
        f"(rdzv-etcd close {keys.job_id}), and wait until they have gone; or add --force"
    )


# --- gc -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Keys of a dead job that no lease will remove."""

    keys: JobKeys
    found: tuple[KeyValue, ...]


@click.command()
@click.option("--delete", is_flag=True, help="Remove them; without this they are only listed.")
@yes_option
@common
def gc(*, delete: bool, yes: bool, target: Target, as_json: bool) -> int:
    """Find keys that no lease will ever remove, in jobs that have no node and no round.

    This library writes none; a program or person that wrote under its prefix may have.

    \b
    Exit code: 0 done, 1 some could not be removed, 3 etcd cannot be asked.
    """
    settings = target.settings()
    found, removed = asyncio.run(_gc(settings, delete, yes))
    if as_json:
        jobs = [{"job": each.keys.job_id, "keys": len(each.found)} for each in found]
        output.show_json("gc", {"jobs": jobs, "deleted": removed})
    elif not found:
        output.say(f"nothing is left over under {settings.prefix}")
    else:
        rows = [
            (each.keys.job_id, len(each.found), each.found[0].key.decode(errors="replace"))
            for each in found
        ]
        output.console().print(output.table(("JOB", "KEYS", "FIRST"), rows))
        output.say(f"{removed} keys removed" if delete else "nothing removed: add --delete")
    total = sum(len(each.found) for each in found)
    return output.NOT_DONE if delete and removed < total else output.DONE


async def _gc(settings: Settings, delete: bool, yes: bool) -> tuple[list[Leftovers], int]:
    removed = 0
    async with connected(settings) as etcd:
        jobs, _ = await jobs_under(etcd, settings.prefix, _JOBS)
        every = [await _leftovers(etcd, JobKeys(settings.prefix, job)) for job in jobs]
        found = [each for each in every if each.found]
        if not delete or not found:
            return found, 0
        total = sum(len(each.found) for each in found)
        output.confirm(f"remove {total} keys of {len(found)} jobs?", yes=yes)
        for each in found:
            removed += await _remove(etcd, each)
    return found, removed


async def _leftovers(etcd: Etcd, keys: JobKeys) -> Leftovers:
    found = (await read_pages(etcd, keys.all, keys_only=True)).kvs
    lives = any(
        kv.lease_id and (kv.key in keys.nodes or kv.key in (keys.round, keys.leader))
        for kv in found
    )
    return Leftovers(keys, () if lives else tuple(kv for kv in found if not kv.lease_id))


async def _remove(etcd: Etcd, leftovers: Leftovers) -> int:
    removed, step = 0, inspect_requests.KEYS_PER_TXN
    for at in range(0, len(leftovers.found), step):
        part = leftovers.found[at : at + step]
        txn = inspect_requests.remove_leftovers(leftovers.keys, part)
        if (await etcd.txn(txn)).succeeded:
            removed += len(part)
    return removed
