"""How an agent's workers failed, as its rendezvous finds it where torch's agent keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rdzv_etcd.torch_plugin.errors import why_workers_failed


def _invoke_run(run_result: object) -> str:
    """Call it as torch's agent does: from what its loop calls."""
    return restart_workers()


def restart_workers() -> str:
    return why_workers_failed()


def failed(**failures: ProcessFailure) -> RunResult:
    """By their ranks: ``_1=…``."""
    ranks = {int(rank.strip("_")): failure for rank, failure in failures.items()}
    return RunResult(WorkerState.FAILED, failures=ranks)


def recorded(path: Path, message: object, at_s: int = 100) -> ProcessFailure:
    """With the error file that torch's ``@record`` writes."""
    told = {"message": {"message": message, "extraInfo": {"timestamp": str(at_s)}}}
    path.write_text(json.dumps(told), encoding="utf-8")
    return ProcessFailure(0, 7, 1, str(path))


def test_it_is_the_first_worker_to_fail(tmp_path: Path) -> None:
    first = recorded(tmp_path / "first", "ValueError: no data\nin shard 7", at_s=100)
    second = recorded(tmp_path / "second", "RuntimeError: closed by peer", at_s=101)
    assert _invoke_run(failed(_2=second, _5=first)) == (
        "worker of rank 5 ended with exit code 1: ValueError: no data, 1 more failed"
    )


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_without_a_record_it_is_the_exit_code(code: int, how: str) -> None:
    assert _invoke_run(failed(_1=ProcessFailure(0, 7, code, "<N/A>"))) == f"worker of rank 1 {how}"


def test_what_a_worker_says_fits_into_one_line(tmp_path: Path) -> None:
    told = _invoke_run(failed(_1=recorded(tmp_path / "error", "\x1b[2J" + "x" * 10_000)))
    assert told.isprintable()
    assert "\\x1b" in told
    assert len(told) < 200


class Broken:
    """What no torch up to now keeps there."""

    @property
    def failures(self) -> object:
        raise RuntimeError("not yet")


def anything(**values: Any) -> object:
    return type("Anything", (), values)()


@pytest.mark.parametrize(
    ("run_result", "told"),
    [
        (RunResult(WorkerState.HEALTHY), ""),
        (None, ""),
        (Broken(), ""),
        (anything(failures=[1]), ""),
        (anything(failures={1: anything(exitcode=None, timestamp="x")}), "worker of rank 1 failed"),
        (
            anything(failures={1: anything(exitcode=2, message={"message": ["x"]})}),
            "worker of rank 1 ended with exit code 2",
        ),
    ],
)
def test_whatever_is_there_breaks_nothing(run_result: object, told: str) -> None:
    assert _invoke_run(run_result) == told


def test_outside_of_an_agent_there_is_nothing_to_tell() -> None:
    assert why_workers_failed() == ""
