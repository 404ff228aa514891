"""How the suite runs as a whole: the order of its tests, and which skips are failures.

Knows pytest and pytest-xdist, which may be missing; knows the tests only by the names of their
folders.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.python_path import EVERY_PYTHON, python_path

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

TESTS = Path(__file__).parents[1]

ALLOWED_SKIPS_VARIABLE = "RDZV_ETCD_ALLOWED_SKIPS"
"""A regular expression. If set, a test skipped for a reason that it does not match is a failure."""

SKIPPED = 7
"""pytest's exit status then, which is none of its own."""

COLD_STARTS_VARIABLE = "RDZV_ETCD_TEST_COLD_STARTS"
"""If it is in the environment, no torchrun agent is forked."""

LATE_STARTS_VARIABLE = "RDZV_ETCD_TEST_LATE_S"
"""With it every second Python that a test starts sleeps first, for up to so many seconds, as on a
busy machine. A test that fails then has taken an order of events for granted."""

TOGETHER = re.compile(
    r"tests/(integration/test_\w+|faults/test_training\w*|examples/test_frameworks"
    r"|torchrun/test_hangs)"
)
"""Tests that stay on one worker, by their ids: those of such a file hurt one cluster of containers
or one training, use environments that are made for them, or look at what was played once."""

LONG = ("faults", "torchrun", "benchmarks", "scale")
"""The folders whose tests take longest. They are distributed one by one."""

SHORT = ("cli", "library", "node", "plugin", "sim", "typed")
"""Folders whose tests are distributed one by one as well, as they need nothing that a file shares.
All others are distributed file by file."""

ON_ONE_CLUSTER = tuple(
    f"tests/integration/test_{name}" for name in ("etcd_faults", "node_faults", "worlds")
)
"""These are one group: one cluster of containers serves them all. It begins the run, as it makes
the images that others of the folder need. That takes a fifth of the run, and whoever begins earlier
only waits for them."""

GROUPS_FROM, GROUPS_UNTIL = 0.25, 0.45
"""The share of the run in which everything else begins that is kept together."""

SHORT_ALONE = 0.3
"""The share of the short tests that is kept for the end, so that no worker ends long after the
others."""


def make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Return what distributes the tests over ``-n`` workers: in their order, groups kept together.

    ``--dist loadgroup`` would do the same, but does not work here: xdist 3.8 writes a test's group
    where pytest 9.2 does not read it, and then lets its tests run anywhere.
    """
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - xdist may be missing

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc] # xdist is untyped
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def group_of(nodeid: str) -> str:
    """Return what must be the same for two tests to be kept on one worker, in their order."""
    found = TOGETHER.search(nodeid)
    if found:
        return ON_ONE_CLUSTER[0] if found[0] in ON_ONE_CLUSTER else found[0]
    file, _, _ = nodeid.partition("::")
    return nodeid if any(f"tests/{folder}/" in file for folder in (*LONG, *SHORT)) else file


def with_slow_tests(config: pytest.Config) -> bool:
    """Whether the tests marked ``slow`` are run as well."""
    return "not slow" not in config.option.markexpr


def before_a_release(config: pytest.Config) -> bool:
    """Whether the tests marked ``release`` are run as well."""
    return "not release" not in config.option.markexpr


def mix(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for several workers; alone, pytest's own order needs the fewest servers.

    What is kept together because it shares a cluster or a training is one worker's for minutes, so
    it comes early. All else is mixed, for the tests of some folders mostly wait, those of others
    compute: each folder's are spread over the whole run, in their order.
    """
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, dict[str, None]] = {}
    for item in items:
        groups.setdefault(_folder(item), {})[group_of(item.nodeid)] = None
    places: dict[str, float] = {}
    for folder, names in groups.items():
        share = 1.0 if folder in SHORT else 1.0 - SHORT_ALONE
        for number, name in enumerate(names):
            place = number / len(names)
            if TOGETHER.fullmatch(name):
                place = GROUPS_FROM + (GROUPS_UNTIL - GROUPS_FROM) * place
            else:
                place *= share
            places[name] = -1.0 if name == ON_ONE_CLUSTER[0] else place
    items.sort(key=lambda item: places[group_of(item.nodeid)])


class SkipGuard:
    """Collects why tests were skipped, from all workers, and fails the run if one may not be."""

    def __init__(self, allowed: str) -> None:
        self._allowed = re.compile(allowed)
        self._unexpected: dict[str, str] = {}
        """Test id and reason."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected:
            session.exitstatus = SKIPPED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unexpected:
            terminalreporter.section(f"skipped, which {ALLOWED_SKIPS_VARIABLE} does not allow")
            for test, reason in self._unexpected.items():
                terminalreporter.write_line(f"{test}: {reason}", red=True)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            place = report.longrepr
            reason = str(place[2] if isinstance(place, tuple) else place)
            if not self._allowed.search(reason):
                self._unexpected[report.nodeid] = reason


def ask_for_late_starts() -> None:
    """Pass :data:`LATE_STARTS_VARIABLE` on to all Pythons that are started from here."""
    if LATE_STARTS_VARIABLE in os.environ:
        os.environ["PYTHONPATH"] = python_path(EVERY_PYTHON)


def freeze_what_is_imported() -> None:
    """Let the garbage collector leave alone what there is before the first test.

    That is torch, mostly: a look through it takes 0.15 s and more, and each check for leaks asks
    for several. They took a sixth of the whole suite's CPU time.
    """
    gc.collect()
    gc.freeze()


def guard_skips(config: pytest.Config) -> None:
    """Register a :class:`SkipGuard` if the environment asks for one."""
    allowed = os.environ.get(ALLOWED_SKIPS_VARIABLE)
    if allowed is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipGuard(allowed), "skip-guard")


def _folder(item: pytest.Item) -> str:
    """The folder of tests/ that the test is in, or the file if it is in none."""
    return item.path.relative_to(TESTS).parts[0]
