"""The clock that decisions go by."""

from __future__ import annotations

import sys

from tests.support.processes import output, run

_SUSPENDED_S = 100_000


def test_the_clock_counts_the_time_for_which_the_machine_was_suspended() -> None:
    """A time namespace stands for the machine, where there can be one: in it Linux tells the same
    difference between its two clocks as on a machine that was suspended for so long."""
    namespace = ["unshare", "--time", "--boottime", str(_SUSPENDED_S), "--"]
    program = (
        "import time; from rdzv_etcd.clock import SystemClock;"
        "print(SystemClock().now_s() - time.clock_gettime(time.CLOCK_BOOTTIME))"
    )
    if not _works([*namespace, "true"]):  # not allowed, or an old kernel
        namespace = []
    told = output([*namespace, sys.executable, "-c", program])
    assert abs(float(told)) < _SUSPENDED_S / 2


def _works(command: list[str]) -> bool:
    try:
        return not run(command).returncode
    except OSError:
        return False
