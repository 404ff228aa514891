"""The program behind the figures of docs/library.md runs, and counts what it says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.servers import EtcdServer


def test_it_counts_what_etcd_was_asked_for(etcd_server: EtcdServer) -> None:
    """Others may use this etcd meanwhile: it counts at least what these two nodes do."""
    command = [sys.executable, "-m", "benchmarks.library_costs", etcd_server.endpoint]
    done = subprocess.run(
        [*command, "--nodes=2", "--idle=1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    threads = re.findall(r"^threads (\d+), connections to etcd 1, others \d$", done.stdout, re.M)
    assert len(threads) == 2
    assert all(int(count) > 0 for count in threads)
    writes = re.search(r"^a set in the store: ([\d.]+) writes", done.stdout, re.M)
    assert writes is not None
    assert float(writes[1]) >= 1.0
