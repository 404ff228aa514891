"""``rdzv-etcd status``: the state of a job, or of all jobs. Writes nothing to etcd."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import click
from rich.text import Text

from rdzv_etcd.cli import output
from rdzv_etcd.cli.jobs import Job, connected, jobs_under, read_job
from rdzv_etcd.cli.options import JobTarget, common
from rdzv_etcd.cli.report import Report, Row, State, report_on
from rdzv_etcd.embedded.cluster_start import cluster_state
from rdzv_etcd.errors import EtcdError, StateCorruptError
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.protocol.describe import lost_and_left
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Settings

_JOBS = 1000
"""Each costs four small reads."""
_AT_ONCE = 8
_STYLES = {
    "works": "green",
    "lost": "bold red",
    "corrupt": "bold red",
    "coming back": "yellow",
    "stranger": "yellow",
}


@click.command()
@click.argument("job", required=False)
@click.option("--all", "every_node", is_flag=True, help="List every node of a very large job.")
@common
def status(*, job: str | None, every_node: bool, target: JobTarget) -> int:
    """Show the state of JOB, or one line for each job.

    \b
    Exit code: 0 it works, 1 it waits, 2 it is closed, gone or unknown, 3 etcd cannot be asked.
    Without JOB: 0, or 3.
    """
    is_about_all = not (job or target.job_id)
    settings = target.settings("" if is_about_all else target.job(job))
    try:
        if is_about_all:
            return asyncio.run(_all_jobs(settings, target.as_json))
        return asyncio.run(_one(settings, every_node, target.as_json))
    except EtcdError as error:
        if settings.embeds_cluster:
            error.args = (f"{error}; {cluster_state(settings.connection)}",)
        raise


async def _one(settings: Settings, every_node: bool, as_json: bool) -> int:
    async with connected(settings) as etcd:
        began_s = time.monotonic()
        report, view = await _report(
            etcd, settings, settings.job_id, every_node=every_node, closely=True
        )
        took_s = time.monotonic() - began_s
    if as_json:
        cluster = await asyncio.to_thread(_cluster_fields, settings)
        output.show_json("status", as_fields(report, view) | {"cluster": cluster})
    else:
        where = f"etcd {settings.connection}, read in {output.duration(took_s)}"
        if settings.embeds_cluster:
            where += f"; {await asyncio.to_thread(cluster_state, settings.connection)}"
        for part in render(report, where):
            output.console().print(part, soft_wrap=True)
    return report.state.exit_code


async def _all_jobs(settings: Settings, as_json: bool) -> int:
    async with connected(settings) as etcd:
        jobs, is_all = await jobs_under(etcd, settings.prefix, _JOBS)
        reports: list[Report] = []
        for at in range(0, len(jobs), _AT_ONCE):
            some = (_report(etcd, settings, job) for job in jobs[at : at + _AT_ONCE])
            reports += [report for report, _ in await asyncio.gather(*some)]
    if as_json:
        fields = {"jobs": [_brief_fields(report) for report in reports], "is_all": is_all}
        output.show_json("jobs", fields)
        return output.DONE
    if not reports:
        output.print_line(f"no job under {settings.prefix} at {settings.connection}")
    else:
        rows = [(report.job, _verdict(report.state), report.headline) for report in reports]
        output.print_table(("JOB", "STATE", ""), rows)
    if not is_all:
        output.print_line(f"only the first {len(jobs)} jobs are shown")
    if settings.embeds_cluster:
        output.print_line(str(await asyncio.to_thread(cluster_state, settings.connection)))
    return output.DONE


async def _report(
    etcd: Etcd, settings: Settings, job: str, *, every_node: bool = False, closely: bool = False
) -> tuple[Report, Job | None]:
    """Read and judge a job. Raises EtcdError."""
    keys = JobKeys(settings.prefix, job)
    try:
        view = await read_job(etcd, keys, every_node=every_node, closely=closely)
    except StateCorruptError as error:
        return Report(job, State.UNKNOWN, str(error)), None
    return report_on(view), view


# --- for people -----------------------------------------------------------------------------------


def render(report: Report, where: str) -> list[Text]:
    """Make the lines, and the table, that show a report."""
    head = Text.assemble(
        output.cell(report.job, "bold"),
        "  ",
        _verdict(report.state),
        "  ",
        output.line(report.headline),
    )
    lines = [head, *(output.line(f"    {detail}") for detail in report.details)]
    if where:
        lines.append(output.line(f"    {where}", "dim"))
    if report.rows:
        columns = ("NODE", "RANK", "STATE", "ADDRESS", "LAST HEARD", "PID", "")
        lines += [Text(""), output.table(columns, [_cells(row) for row in report.rows])]
    if report.next_step:
        lines.append(Text.assemble(("next: ", "bold"), output.line(report.next_step)))
    return lines


def _cells(row: Row) -> tuple[object, ...]:
    state = row.state.upper() if row.state in ("lost", "corrupt") else row.state
    notes = ["leader"] if row.leads else []
    notes += [row.why] if row.why else []
    notes += [f"being drained: {row.leaves}"] if row.leaves else []
    notes += ["keep-alive overdue"] if row.is_overdue else []
    return (
        row.name,
        row.rank,
        output.cell(state, _STYLES.get(row.state, "")),
        row.address,
        heard(row),
        pid_of(row.node_id),
        "; ".join(notes),
    )


def heard(row: Row) -> str | None:
    """When etcd last heard of a node: its lease has so many whole seconds left."""
    if row.heard is None:
        return None
    return f"<{row.heard.silent_s + 1} s (of {row.heard.granted_s})"


def pid_of(node_id: str) -> int | None:
    """The process id in a node's id."""
    parts = node_id.split("~")
    digits = parts[1] if len(parts) == 3 else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def _verdict(state: State) -> Text:
    style = {State.WORKS: "bold green", State.WAITS: "bold yellow"}.get(state, "bold")
    return Text(state.value.upper(), style)


# --- for scripts ----------------------------------------------------------------------------------


def as_fields(report: Report, view: Job | None) -> dict[str, object]:
    """What ``--json`` prints of a report; docs/cli.md describes it."""
    fields = _brief_fields(report)
    fields |= {"details": list(report.details), "next_step": report.next_step or None}
    if view is None:
        return fields
    control = view.control
    record, change, refused = control.round, control.open_change, control.refused
    lost, left = lost_and_left({} if change is None else change.lost)
    return fields | {
        "revision": control.revision,
        "epoch": control.epoch or None,
        "present": view.count,
        "leader": view.state.leader,
        "round": record
        and {
            "number": record.number,
            "run": record.run,
            "size": record.size,
            "min_nodes": record.settings.min_nodes,
            "max_nodes": record.settings.max_nodes,
            "master": {"address": record.master_address, "port": record.master_port},
        },
        "change": change
        and {
            "lost": lost,
            "left": left,
            "waiters": list(change.waiters),
            "unnamed": change.unnamed,
            "because": dict(change.because),
        },
        "closed": control.closure and asdict(control.closure),
        "drains": [
            {"node": node_id, **asdict(drain), "epoch": drain.epoch or None}
            for node_id, drain in sorted(view.drains.items())
        ],
        "refused": refused
        and {
            "node": refused.node_id,
            "why": refused.why,
            **asdict(refused.settings),
            "wall_s": refused.wall_s,
        },
        "nodes": [row_fields(row) for row in report.rows] if view.is_complete else None,
    }


def _cluster_fields(settings: Settings) -> dict[str, object] | None:
    """The hosts of an embedded cluster; ``None`` without one. Blocks for seconds."""
    if not settings.embeds_cluster:
        return None
    state = cluster_state(settings.connection)
    return {
        "members": {state.hosts[seat]: state.answers[seat].age_s for seat in sorted(state.members)},
        "missing": {state.hosts[seat]: why for seat, why in state.missing.items()},
    }


def row_fields(row: Row) -> dict[str, object]:
    return {
        "node": row.node_id,
        "pid": pid_of(row.node_id),
        "rank": row.rank,
        "state": row.state,
        "why": row.why or None,
        "address": row.address or None,
        "leads": row.leads,
        "silent_s": None if row.heard is None else row.heard.silent_s,
        "lease_ttl_s": None if row.heard is None else row.heard.granted_s,
    }


def _brief_fields(report: Report) -> dict[str, object]:
    return {"job": report.job, "state": report.state.value, "headline": report.headline}
