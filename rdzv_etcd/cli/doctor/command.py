"""The command: gathers the facts, runs every check, and prints what they found."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import click
from rich.text import Text

from rdzv_etcd.cli import output
from rdzv_etcd.cli.doctor import checks_etcd, checks_host, checks_job
from rdzv_etcd.cli.doctor.facts import Facts, Finding, Level
from rdzv_etcd.cli.doctor.gather import gather
from rdzv_etcd.cli.options import Seconds, Target, common, nnodes_option

_CHECKS = {"etcd": checks_etcd.CHECKS, "job": checks_job.CHECKS, "host": checks_host.CHECKS}
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@click.command()
@click.argument("job", required=False)
@nnodes_option
@click.option(
    "--listen",
    "listen_s",
    type=Seconds(shortest=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Also keep an idle connection open this long; 30 reveals a limit on pings.",
)
@common
def doctor(*, job: str | None, nnodes: str, listen_s: float, target: Target, as_json: bool) -> int:
    """Diagnose why a job or this node does not work; run it with an agent's own options.

    Looks at etcd, at the way to it, at what this user may do there, at the job and its nodes, at
    this host and at this Python. Writes no key; it is granted a lease without keys, and gives it
    back.

    \b
    Exit code: 0 nothing is wrong (but perhaps doubtful), 1 something is wrong.
    """
    settings = target.settings(job or target.job_id, nnodes)
    is_about_a_job = bool(job or target.job_id or nnodes)
    if listen_s:
        output.warn(f"looking; listening takes {output.duration(listen_s)}")
    facts = asyncio.run(
        gather(settings, is_about_a_job=is_about_a_job, nnodes=nnodes, listen_s=listen_s)
    )
    found = list(examine(facts))
    count = Counter(finding.level for _, _, finding in found)
    if as_json:
        findings = [_fields(*each) for each in found]
        levels = {level.value: count[level] for level in Level}
        output.show_json("doctor", {"findings": findings, "count": levels})
    else:
        for _, _, finding in found:
            _show(finding)
        output.say(_sum(count), "bold")
    return output.FAILED if count[Level.FAIL] else output.DONE


def examine(facts: Facts) -> Iterator[tuple[str, str, Finding]]:
    """Yield every finding, with the group and the name of its check."""
    for group, checks in _CHECKS.items():
        for check in checks:
            for finding in check(facts):
                yield group, check.__name__, finding


def _show(finding: Finding) -> None:
    label = Text(f"{finding.level.value:<5} ", _STYLES[finding.level])
    console = output.console()
    console.print(Text.assemble(label, output.line(finding.text)), soft_wrap=True)
    if finding.hint:
        console.print(output.line(f"      -> {finding.hint}"), soft_wrap=True)


def _sum(count: Counter[Level]) -> str:
    failures, warnings = count[Level.FAIL], count[Level.WARN]
    return (
        f"{failures} failure{'' if failures == 1 else 's'}, "
        f"{warnings} warning{'' if warnings == 1 else 's'}"
    )


def _fields(group: str, name: str, finding: Finding) -> dict[str, object]:
    return {
        "check": f"{group}.{name}",
        "level": finding.level.value,
        "text": finding.text,
        "hint": finding.hint or None,
    }
