"""What ``status`` makes of a job, in one golden file: the verdict, details, nodes, and what to do.

.venv/bin/python -m tests.cli.test_status_text      writes it
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rdzv_etcd.cli.jobs import SHOWN_NODES, Job
from rdzv_etcd.cli.report import Row, report_on
from rdzv_etcd.etcd.port import LeaseLeft
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Accusation, Closure, Control, Drain, Leader, Nodes, Unreadable
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import Scene

GOLDEN = Path(__file__).parent / "status.txt"
KEYS = JobKeys("/rdzv_etcd", "job")
OTHER = JobSettings(7, 7)
A, B, C, D = "a~1~x", "b~2~x", "c~3~x", "d~4~x"
GONE = Accusation(A, "its process exited", is_certain=True)


def world(members: str = f"{A} {B} {C}", most: int = 4, **scene: Any) -> Scene:
    return Scene(1, most, members=members, **scene)


def job_of(scene: Scene, *, unreadable: Mapping[str, Unreadable] | None = None, **more: Any) -> Job:
    """As it is read from etcd. ``more`` are fields of the job, or of its control keys."""
    nodes = replace(scene.nodes, unreadable=unreadable or {})
    of_control = {name: more.pop(name) for name in [*more] if hasattr(scene.control, name)}
    fields = {
        "control": replace(scene.control, **of_control),
        "nodes": nodes,
        "count": len(nodes.present) + len(nodes.unreadable),
        "leases": dict.fromkeys(nodes.present, 7),
    }
    return Job(KEYS, **{**fields, **more})


def closed(scene: Scene, *, succeeded: bool = True) -> Scene:
    """Some hours ago."""
    closure = Closure(A, "seen enough", succeeded, time.time() - 5.51 * 3600)
    control = scene.closed().control
    assert control.round is not None
    ended = tuple(replace(run, closure=closure) for run in control.ended)
    scene.control = replace(control, round=replace(control.round, closure=closure), ended=ended)
    return scene


def jobs() -> dict[str, Job]:
    return {
        "unknown": job_of(Scene()),
        "only its audits are left": job_of(Scene(), formed_at=7),
        "too few for a first round": job_of(Scene(2, 4).new(A)),
        "some have other settings": job_of(Scene(2, 4).new(A).new(B, settings=OTHER)),
        "too many to be read, and nobody leads": Job(KEYS, Control(7), Nodes(7), SHOWN_NODES + 1),
        "it works": job_of(world(), leader=Leader(A, JobSettings(1, 4)), leader_revision=9),
        "too many to be read": Job(KEYS, world().control, Nodes(7), SHOWN_NODES + 1),
        "one was not heard of for long": job_of(world(), left={B: LeaseLeft(1, 10)}),
        "one is missing": job_of(world().gone(B)),
        "one that waits has a seat": job_of(world(A, 2).new(f"{B} {C}")),
        "no seat is left": job_of(world(f"{A} {B}", 2).new(C)),
        "segments lack nodes": job_of(
            Scene(2, 6, segment=2, members="a1 a2").new("b1 c1").spare("a3")
        ),
        "segments are whole, and no seat is left": job_of(
            Scene(2, 2, segment=2, members="a1 a2").new("b1 b2")
        ),
        "no world of whole segments can be formed": job_of(
            Scene(4, 6, segment=2).new("a1 b1 a2 c1")
        ),
        "an accusation of one that is no member stands": job_of(world(A).accused(B, GONE, 0.1)),
        "one has finished": job_of(world().finished(B)),
        "one is drained": job_of(world(), drains={B: Drain("root@vm", "its fan", 50)}),
        "one was lost, another left": job_of(
            world(most=3).gone(f"{B} {C}").changed(lost=B, left=C).back(A)
        ),
        "members are not back yet": job_of(world().gone(B).changed(lost=B)),
        "one was expelled": job_of(world(A, expelled=B).new(B, arrived_for=4)),
        "all nodes of a world are gone": job_of(world().gone(f"{A} {B} {C}")),
        "a foreign key stands in the place of a node": job_of(
            world().gone(C), unreadable={C: Unreadable("it is not JSON", 3)}
        ),
        "and nothing else": job_of(Scene(), unreadable={"odd": Unreadable("it is not JSON", 3)}),
        "it has finished": job_of(closed(world().gone(B))),
        "it has failed": job_of(closed(world(), succeeded=False)),
        "a node waits for the next run": job_of(closed(world()).gone(f"{A} {B} {C}").new(D)),
    }


def row_text(row: Row) -> str:
    notes = ["leader"] if row.leads else []
    notes += [row.why] if row.why else []
    notes += [f"being drained: {row.leaves}"] if row.leaves else []
    notes += ["keep-alive overdue"] if row.is_overdue else []
    rank = "-" if row.rank is None else row.rank
    return f"{row.name}  {rank}  {row.state}  {'; '.join(notes)}".rstrip()


def lines() -> Iterator[str]:
    for name, job in jobs().items():
        report = report_on(job)
        yield f"# {name}"
        yield f"{report.state.value.upper()} ({report.state.exit_code})  {report.headline}"
        yield from (f"    {detail}" for detail in report.details)
        yield from (f"    | {row_text(row)}" for row in report.rows)
        if report.next_step:
            yield f"    next: {report.next_step}"


def test_what_is_shown_is_in_the_golden_file() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")
