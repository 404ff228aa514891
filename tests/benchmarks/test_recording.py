"""What becomes of a run's samples: written and drawn at its end, kept if it ends early."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs the extra 'bench'")

from benchmarks.recording import Recording, recording
from benchmarks.results import failure

ENVIRONMENT = {"load_before": 0.0}


class Run:
    """A run of two parts."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "latency.json"
        self.unfinished = folder / "latency.unfinished.json"
        self.plot = folder / "latency.svg"

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        args = argparse.Namespace(json=self.file, plot=self.plot, repeat=2)
        with recording(args, "latency", ENVIRONMENT, 2) as record:
            yield record

    def is_cut_short_by(self, end: type[BaseException], samples: int = 1) -> None:
        with self.recording() as record:
            record.samples += [{"seconds": 1.0}] * samples
            raise end


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_ends_is_written_shown_and_drawn(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with run.recording() as record:
        for seconds in (1.0, 2.0):
            record.add(f"{seconds} s", {"backend": "etcd3", "nodes": 2, "seconds": seconds})
    document = json.loads(run.file.read_text())
    assert [sample["seconds"] for sample in document["results"]] == [1.0, 2.0]
    assert document["settings"] == {"repeat": 2}
    assert record.document == document
    assert run.plot.exists()
    assert not run.unfinished.exists()
    assert "latency: 1 of 2 done: 1.0 s" in capsys.readouterr().out


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_is_cut_short_keeps_its_samples_and_the_file_of_the_last_run(
    run: Run, end: type[BaseException]
) -> None:
    run.file.write_text("the last run's")
    with pytest.raises(end):
        run.is_cut_short_by(end)
    assert run.file.read_text() == "the last run's"
    assert json.loads(run.unfinished.read_text())["results"] == [{"seconds": 1.0}]
    assert not run.plot.exists()


def test_a_run_without_samples_writes_nothing(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt):
        run.is_cut_short_by(KeyboardInterrupt, samples=0)
    assert not run.file.exists()
    assert not run.unfinished.exists()


def test_of_a_program_that_ended_the_file_keeps_what_it_said_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = RuntimeError("agent a ended with code 1\n  File 'some/path'\nConnectionError: gone\n")
    assert failure(error) == "agent a ended with code 1: ConnectionError: gone"
    assert "some/path" in capsys.readouterr().out
    assert failure(RuntimeError("not within 5 s")) == "not within 5 s"
