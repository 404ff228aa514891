"""Every command of ``python -m benchmarks`` runs in its smallest form and writes what it measured.

No time is asserted: these tests show that the benchmarks work, not what they measure.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `bench` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.__main__ import main
from benchmarks.jobs import PHASES


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run one command with a plot; return its result file's document."""
    file, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    assert main([*arguments, "--json", str(file), "--plot", str(plot)]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["benchmark"] == arguments[0]
    assert document["environment"]["torch"]
    assert document["environment"]["cores"] > 0
    assert plot.read_text().startswith("<?xml")
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


@pytest.mark.slow
def test_agent(tmp_path: Path) -> None:
    document = run(
        tmp_path, "agent", "--nodes=1", "--repeat=1", "--idle=0.5", "--backends=etcd3,none"
    )
    assert failures(document) == []
    agents = [sample for sample in document["results"] if sample["what"] == "agent"]
    assert [sample["backend"] for sample in agents] == ["etcd3", "none"]
    workers = [sample for sample in document["results"] if sample["what"] == "worker"]
    with_plugin = next(worker for worker in workers if worker["with_plugin"])
    assert with_plugin["modules"] == ["rdzv_etcd", "rdzv_etcd.torch_plugin"]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.torchrun
def test_recovery(tmp_path: Path) -> None:
    document = run(
        tmp_path, "recovery", "--backends=etcd3", "--cases=sigterm", "--repeat=1", "--lease-ttl=3"
    )
    assert failures(document) == []
    (sample,) = document["results"]
    parts = sum(sample[phase] for phase in PHASES)
    assert sample["total"] == pytest.approx(parts)
