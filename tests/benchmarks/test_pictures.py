"""The pictures of result files: all of them can be drawn.

Drawn from the committed results and from made-up ones, such as a faster machine's or another
outcome would be.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks import plots, results
from benchmarks.drawing import save
from benchmarks.timeline import FORMING, UNSPLIT, WAIT, middle_run, timeline

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED = [it.stem for it in sorted(RESULTS.glob("*.json")) if it.stem in plots.DRAW]
Document = dict[str, Any]


def committed(name: str) -> Document:
    return results.read(RESULTS / f"{name}.json")


def recovered(case: str, backend: str, *totals: float | None) -> list[dict[str, Any]]:
    """Samples whose time is the forming of the world; ``None``: one that did not recover."""
    nothing = dict.fromkeys(("detection", "worker_stop", "worker_start", "first_step"), 0.0)
    return [
        {"case": case, "backend": backend, "failed": "not within 120 s: steps"}
        if total is None
        else {"case": case, "backend": backend, **nothing, "re_forming": total, "total": total}
        for total in totals
    ]


# --- what a recovery is made of -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "waited"),
    [
        pytest.param(0.2, 0.0, id="known before the workers had stopped"),
        pytest.param(4.5, 4.0, id="known while all waited"),
        pytest.param(99.0, 9.0, id="known late: not beyond the new ranks"),
    ],
)
def test_the_wait_for_the_loss_is_told_from_the_forming(known: float, waited: float) -> None:
    sample = {
        "case": "member",
        "detection": 0.4,
        "worker_stop": 0.1,
        "re_forming": 9.0,
        "worker_start": 1.0,
        "first_step": 0.5,
        "loss_known": known,
    }
    parts = timeline(sample)
    assert parts[WAIT] == pytest.approx(waited)
    assert sum(parts.values()) == pytest.approx(11.0)


def test_what_a_file_does_not_tell_apart_is_not_told_apart() -> None:
    for sample in committed("recovery")["results"]:
        if "failed" not in sample:
            sample.pop("loss_known", None)
            parts = timeline(sample)
            lost = sample["case"] not in ("node-added", "worker-crash")
            assert (UNSPLIT in parts, FORMING in parts) == (lost, not lost)
            assert sum(parts.values()) == pytest.approx(sample["total"])


def test_a_bar_is_the_run_in_the_middle() -> None:
    runs = recovered("member", "etcd3", 3.0, None, 1.0, 2.0)
    middle = middle_run(runs)
    assert middle is not None
    assert middle["total"] == 2.0
    assert middle_run(runs[1:2]) is None


# --- drawing --------------------------------------------------------------------------------------


def told_apart() -> Document:
    """The committed recoveries, as a file with all that is recorded now, of three runs each."""
    document = committed("recovery")
    samples = []
    for sample in document["results"]:
        for number in range(3):
            one = copy.deepcopy(sample)
            if "failed" not in one and one["case"] not in ("node-added", "worker-crash"):
                one["loss_known"] = one["detection"] + number * one["re_forming"] / 3
            if number == 2 and one["backend"] == "c10d":
                one = {"case": one["case"], "backend": "c10d", "failed": "an agent ended"}
            samples.append(one)
            if one["backend"] == "etcd3" and one["case"] != "worker-crash":
                samples.append({**one, "backend": "etcd3 in process"})
    return {**document, "results": samples}


def on_gpus() -> Document:
    samples = []
    for (nodes, workers), (place, backend) in itertools.product(
        [(1, 8), (2, 4)], enumerate(("etcd3", "c10d", "etcd-v2-own-store", "etcd"))
    ):
        began = 4.0 + place
        launch = {"rendezvous": began, "process_group": began + 2, "first_allreduce": began + 2.4}
        (killed,) = recovered("member", backend, 1.0 + 20 * place)
        sample = {"backend": backend, "nodes": nodes, "workers": workers, "device": "cuda"}
        samples.append({**sample, "launch": launch, "after_kill": killed})
    return {"settings": {}, "results": samples}


PICTURES: dict[str, tuple[Callable[[Document], Figure], Callable[[], Document]]] = {
    **{name: (plots.DRAW[name], functools.partial(committed, name)) for name in COMMITTED},
    "recovery, told apart": (plots.draw_recovery, told_apart),
    "recovery, beside c10d": (plots.draw_beside_c10d, told_apart),
    "gpu": (plots.draw_gpu, on_gpus),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_result_file_can_be_drawn(name: str, tmp_path: Path) -> None:
    draw, document = PICTURES[name]
    figure = draw(document())
    figure.savefig(tmp_path / "plot.svg")
    assert any(axes.has_data() for axes in figure.axes)


def test_what_did_not_recover_reaches_the_edge() -> None:
    """An empty row would look like the fastest one."""
    samples = [*recovered("member", "etcd3", 2.0), *recovered("member", "c10d", None)]
    figure = plots.draw_recovery({"settings": {"limit": 120}, "results": samples})
    axes = figure.axes[1]  # after the key
    widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [width for width in widths if width > 0] == [2.0, axes.get_xlim()[1]]
    assert "not within 120 s" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", COMMITTED)
def test_a_run_that_measured_nothing_can_be_drawn(name: str, tmp_path: Path) -> None:
    document = committed(name)
    kept = ("backend", "case", "kind", "nodes", "phase", "what", "store", "operation", "agents")
    samples = [
        {"failed": "it does not start", **{k: v for k, v in sample.items() if k in kept}}
        for sample in document["results"]
    ]
    for left in (samples, []):
        figure = plots.DRAW[name]({**document, "results": left})
        figure.savefig(tmp_path / "plot.svg")


def test_the_same_samples_make_the_same_file(tmp_path: Path) -> None:
    written = []
    for name in ("one.svg", "two.svg"):
        save(plots.draw_latency(committed("latency")), tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
