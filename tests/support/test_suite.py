"""The rules by which the suite runs hold with one process and with several."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import processes, suite
from tests.support.suite import ALLOWED_SKIPS_VARIABLE, SKIPPED, TESTS, group_of

_CONFTEST = """
from tests.support import suite

def pytest_configure(config):
    suite.guard_skips(config)

def pytest_xdist_make_scheduler(config, log):
    return suite.make_scheduler(config, log)
"""
_SKIPS = """
import pytest

def test_skipped():
    pytest.skip("no IPv6 here")

def test_passed():
    pass
"""
_GROUPED = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_grouped(number):
    pathlib.Path(__file__).with_name(f"worker-{os.getpid()}").touch()
"""
_OTHERS = """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_others(number):
    pass
"""

_SLEEPS_COUNTED = """
import runpy, sys, time
file = sys.modules["sitecustomize"].__file__
slept = []
time.sleep = slept.append
for _ in range(100):
    runpy.run_path(file)
print(len(slept))
"""


def run(folder: Path, tests: str, *options: str, **environment: str) -> tuple[int, str]:
    """Run tests of its own in ``folder``; return pytest's exit code and output."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = processes.run([*command, *options, str(folder)], cwd=TESTS.parent, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_only_allowed_skips_pass(tmp_path: Path, workers: str) -> None:
    options = ("-n", workers)
    code, output = run(tmp_path, _SKIPS, *options, **{ALLOWED_SKIPS_VARIABLE: "IPv6|IPv4"})
    assert code == 0, output
    code, output = run(tmp_path, _SKIPS, *options, **{ALLOWED_SKIPS_VARIABLE: "no etcd"})
    assert code == SKIPPED, output
    assert "test_it.py::test_skipped: Skipped: no IPv6 here" in output


def test_skipped_modules_count_too(tmp_path: Path) -> None:
    tests = "import pytest\npytest.importorskip('no_such_module')\n" + _SKIPS
    code, output = run(tmp_path, tests, "-n", "2", **{ALLOWED_SKIPS_VARIABLE: "IPv6"})
    assert code not in (0, 2), output
    assert "could not import 'no_such_module'" in output


@pytest.mark.slow
def test_the_container_tests_of_a_file_stay_in_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "integration"
    folder.mkdir(parents=True)
    (folder / "test_grouped.py").write_text(_GROUPED)
    code, output = run(tmp_path, _OTHERS, "-n", "3")
    assert code == 0, output
    assert "18 passed" in output
    assert len(list(folder.glob("worker-*"))) == 1


def test_tests_that_share_a_training_stay_together() -> None:
    """Those of one file, or on one cluster of containers; nothing else."""
    place = "tests/faults/test_training_hosts.py::test_"
    first = group_of(f"{place}one[etcd-3.5.1]")
    assert first == group_of(f"{place}two[etcd-3.5.1-9s]")
    others = [
        "tests/faults/test_training.py::test_one[etcd-3.5.1]",
        "tests/faults/test_network.py::test_one[etcd-3.5.1]",
        "tests/faults/test_network.py::test_two[etcd-3.5.1]",
    ]
    assert len({first, *map(group_of, others)}) == 4
    containers = ("etcd_faults", "worlds", "tls")
    groups = [group_of(f"tests/integration/test_{name}.py::test_it") for name in containers]
    assert groups[0] == groups[1] != groups[2]


def test_a_run_that_asks_for_late_starts_gets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(suite.LATE_STARTS_VARIABLE, "0")
    suite.ask_for_late_starts()
    assert 0 < int(processes.output([sys.executable, "-c", _SLEEPS_COUNTED])) < 100
