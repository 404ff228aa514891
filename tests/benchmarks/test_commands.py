"""Every command of ``python -m benchmarks`` runs in its smallest form and writes what it measured.

No time is asserted: these tests show that the benchmarks work, not what they measure. CI
runs two of them, and mypy looks at all; the others run before a release, when they are of use.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.__main__ import COMMANDS, main
from benchmarks.figures import figures
from benchmarks.jobs import EMBEDDED, IN_PROCESS, PHASES, SUPERVISED
from benchmarks.report import BEGIN, END
from benchmarks.results import write
from benchmarks.scale import FIRST, IDLE, LEADER, ONE, TENTH, WrongWorldError, check_world, fit
from benchmarks.scale import PHASES as PHASES_OF_SCALE
from tests.support import netns


def run(tmp_path: Path, *arguments: str, has_plot: bool = True) -> dict[str, Any]:
    """Run one command, with a plot if it has one; return its result file's document."""
    file, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    plotted = ["--plot", str(plot)] if has_plot else []
    assert main([*arguments, "--json", str(file), *plotted]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["benchmark"] == arguments[0]
    assert document["environment"]["torch"]
    assert document["environment"]["cores"] > 0
    assert document["environment"]["million_additions_s"] > 0
    assert not has_plot or plot.read_text().startswith("<?xml")
    return document


def failures(document: dict[str, Any]) -> list[str]:
    return [sample["failed"] for sample in document["results"] if "failed" in sample]


@pytest.mark.slow
def test_latency(tmp_path: Path) -> None:
    document = run(tmp_path, "latency", "--nodes=2", "--repeat=1", "--backends=etcd3,c10d,bare")
    assert failures(document) == []
    assert [sample["backend"] for sample in document["results"]] == ["etcd3", "c10d", "bare"]
    for sample in document["results"]:
        assert sample["seconds"] > 0
        assert len(sample["node_seconds"]) == 2
        assert sample["requests_per_node"] > 0


@pytest.mark.release
def test_agent(tmp_path: Path) -> None:
    document = run(
        tmp_path,
        "agent",
        "--nodes=1",
        "--repeat=1",
        "--idle=0.5",
        "--backends=etcd3,etcd3 embedded,none",
    )
    assert failures(document) == []
    agents = [sample for sample in document["results"] if sample["what"] == "agent"]
    assert [sample["backend"] for sample in agents] == ["etcd3", "etcd3 embedded", "none"]
    assert len(agents[1]["members"]) == 3
    workers = [sample for sample in document["results"] if sample["what"] == "worker"]
    with_plugin = next(worker for worker in workers if worker["with_plugin"])
    assert with_plugin["modules"] == ["rdzv_etcd", "rdzv_etcd.torch_plugin"]


@pytest.mark.release
def test_store(tmp_path: Path) -> None:
    document = run(
        tmp_path,
        "store",
        "--stores=EtcdStore,TCPStore",
        "--count=2",
        "--batch=3",
        "--writers=2",
        "--adds=2",
        "--agents=4",
        "--processes=2",
        "--repeat=1",
    )
    assert failures(document) == []
    assert all(sample["seconds"] for sample in document["results"])
    operations = {sample["operation"] for sample in document["results"]}
    assert {"set", "get", "wait", "add, 2 writers", "exchange", "barrier"} <= operations


@pytest.mark.parametrize(
    "rack_nodes",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.release)],
)
def test_scale(rack_nodes: int, tmp_path: Path) -> None:
    """Every phase with ranks in slices; that each world is right is checked by the command."""
    document = run(
        tmp_path,
        "scale",
        "--nodes=64",
        "--heads=8",
        "--connections=1",
        "--slice-nodes=16",
        f"--rack-nodes={rack_nodes}",
        "--lease-ttl=15",  # the real nodes among them must not lose theirs
        "--idle=1",
    )
    assert failures(document) == []
    samples = {(sample["kind"], sample["phase"]): sample for sample in document["results"]}
    assert set(samples) == {("etcd3", phase) for phase in PHASES_OF_SCALE} | {("bare", FIRST)}
    assert samples["etcd3", ONE]["alive"] == 63
    assert samples["etcd3", LEADER]["alive"] == 62
    assert samples["etcd3", TENTH]["alive"] == 56
    first = samples["etcd3", FIRST]
    assert first["seconds"] > 0
    assert first["failed_compares_per_node"] == 0
    assert samples["etcd3", IDLE]["writes"] == 0


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([(0, 0, "a", ())], id="one is missing"),
        pytest.param([(0, 0, "a", ()), (1, 0, "a", ())], id="a rank is held twice"),
        pytest.param([(0, 0, "a", ()), (1, 1, "b", ())], id="they see different worlds"),
    ],
)
def test_a_wrong_world_is_noticed(nodes: list[Any]) -> None:
    worlds = {"a": (1, 2, 7, "", 0), "b": (2, 2, 9, "", 0)}
    seen = [(index, rank, worlds[name], times) for index, rank, name, times in nodes]
    with pytest.raises(WrongWorldError):
        check_world(seen, {0, 1})


def test_the_fit_finds_the_exponent() -> None:
    rows = {("etcd3", FIRST, nodes): {"seconds": 0.5 * nodes**1.5} for nodes in (10, 100, 1000)}
    assert fit(rows, "etcd3", FIRST, "seconds") == pytest.approx(1.5)
    assert fit(rows, "bare", FIRST, "seconds") is None


@pytest.mark.release
@pytest.mark.torchrun
@pytest.mark.parametrize("backend", ["etcd3", IN_PROCESS, SUPERVISED])
def test_recovery(tmp_path: Path, backend: str) -> None:
    document = run(
        tmp_path,
        *("recovery", f"--backends={backend}", "--cases=sigterm", "--repeat=1", "--lease-ttl=3"),
    )
    assert failures(document) == []
    (sample,) = document["results"]
    parts = sum(sample[phase] for phase in PHASES)
    assert sample["total"] == pytest.approx(parts)


@pytest.mark.release
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())
@pytest.mark.parametrize(("backend", "case"), [(IN_PROCESS, "silent"), (EMBEDDED, "store-host")])
def test_recovery_from_the_loss_of_a_host(tmp_path: Path, backend: str, case: str) -> None:
    arguments = ["recovery", f"--backends={backend}", f"--cases={case}", "--repeat=1"]
    document = run(tmp_path, *arguments, "--lease-ttl=3")
    assert failures(document) == []
    (sample,) = document["results"]
    assert 0 < sample["loss_known"] <= sample["total"]


@pytest.mark.release
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not())
def test_false_alarms(tmp_path: Path) -> None:
    document = run(tmp_path, "false-alarms", "--rows=etcd-away", "--seconds=20", has_plot=False)
    assert failures(document) == []
    (sample,) = document["results"]
    assert sample["disturbances"] > 0
    assert sample["restarts"] == 0


@pytest.mark.release
def test_peers(tmp_path: Path) -> None:
    """Another system is measured, or it is said that it does not install here."""
    arguments = ["peers", "--nodes=2", "--repeat=1", "--systems=etcd3,torchft"]
    document = run(tmp_path, *arguments)
    ours, other = document["results"]
    assert ours["seconds"] > 0
    if "failed" in other:
        assert other["failed"].startswith("torchft-nightly does not install: ")
    else:
        assert other["seconds"] > 0
        assert document["environment"]["peers"]["torchft-nightly"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_with_its_default(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    # An option whose text is on the next line is followed by more blanks than one without any.
    said = re.sub(r"\n {10,}", "  ", capsys.readouterr().out.partition("options:\n")[2])
    for line in said.splitlines():
        name, _, text = line.strip().partition("  ")
        assert text.strip(), f"{command} {name} is not explained"
    if command != "report":
        assert "--data DATA" in said
        assert "(default: /var/tmp)" in said


@pytest.mark.release
@pytest.mark.torchrun
def test_gpu_without_a_gpu(tmp_path: Path) -> None:
    """The dry run on the CPU; with one node a worker is killed."""
    document = run(tmp_path, "gpu", "--device=cpu", "--backends=etcd3", "--nodes=1", "--repeat=1")
    assert failures(document) == []
    (sample,) = document["results"]
    assert sample["collectives"] == "gloo"
    assert sample["launch"]["rendezvous"] <= sample["launch"]["first_allreduce"]
    assert sample["after_kill"]["total"] > 0


@pytest.mark.slow
def test_report(tmp_path: Path) -> None:
    """Only what is between the markers changes, and ``--check`` notices when that is stale."""
    folder = tmp_path / "results"
    measured = ["latency", "--nodes=2", "--repeat=1", "--backends=bare"]
    assert main([*measured, "--json", str(folder / "latency.json")]) == 0
    readme, shown, notes = (tmp_path / name for name in ("README.md", "shown.md", "NOTES.md"))
    for file in (readme, shown, notes):
        file.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    arguments = ["report", "--readme", str(readme), "--document", str(shown)]
    arguments += ["--notes", str(notes), "--results", str(folder)]
    with pytest.raises(ValueError, match="out of date"):
        main([*arguments, "--check"])
    assert main(arguments) == 0
    for file in (readme, shown, notes):
        text = file.read_text()
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"{END}\nafter\n")
        assert "stale" not in text
    text = shown.read_text()
    assert "| nodes | bare calls |" in text
    assert "GPUs are missing" in notes.read_text()
    assert "**Scale**: not measured yet" in text
    assert (folder / "latency.svg").exists()
    assert main([*arguments, "--check"]) == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--etcd={}/missing", "missing cannot be executed: No such file"),
        ("--etcd=/bin/true", "/bin/true --version does not look like etcd's"),
        ("--data={}/missing", "missing is not a folder"),
        ("--data=/dev/shm", "/dev/shm is in memory"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["latency", option.format(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_documents_figures_are_the_committed_results() -> None:
    """If this fails, run ``python -m benchmarks report``."""
    assert main(["report", "--check"]) == 0


@pytest.mark.parametrize(
    ("runs_s", "shown"),
    [
        ([7.0, None, None], "not within 9 s in 2 of 3 runs"),
        ([7.0, 8.0, None], "7.5 s; not within 9 s in 1 of 3 runs"),
        ([7.0, 8.0], "7.5 s"),
        ([None, None], "not within 9 s"),
    ],
)
def test_the_readme_shows_runs_that_did_not_recover(
    tmp_path: Path, runs_s: list[float | None], shown: str
) -> None:
    samples = [
        {"case": "member", "backend": "c10d"}
        | ({"failed": "late"} if s is None else dict.fromkeys((*PHASES, "new_ranks", "total"), s))
        for s in runs_s
    ]
    write(tmp_path / "recovery.json", "recovery", {}, {"limit": 9.0}, samples)
    assert shown in [row[2] for row in figures(tmp_path)]


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing to see\n")
    with pytest.raises(ValueError, match="has no"):
        main(["report", "--readme", str(readme), "--results", str(tmp_path)])
