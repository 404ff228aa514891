"""The program behind the figures of docs/library.md runs, and counts what it says."""

from __future__ import annotations

import re
import sys

from tests.support.processes import output
from tests.support.servers import EtcdServer


def test_it_counts_what_etcd_was_asked_for(etcd_server: EtcdServer) -> None:
    """Others may use this etcd meanwhile: it counts at least what these two nodes do."""
    command = [sys.executable, "-m", "benchmarks.library_costs", etcd_server.endpoint]
    printed = output([*command, "--nodes=2", "--idle=1"])
    threads = re.findall(r"^threads (\d+), connections to etcd 1, others \d$", printed, re.M)
    assert len(threads) == 2
    assert all(int(count) > 0 for count in threads)
    writes = re.search(r"^a set in the store: ([\d.]+) writes", printed, re.M)
    assert writes is not None
    assert float(writes[1]) >= 1.0
