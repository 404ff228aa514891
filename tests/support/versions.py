"""On which etcd versions a test runs.

What depends on etcd's own behaviour is marked ``every_etcd`` and runs on every version under test;
all else, and everything if the slow tests are left out, runs on the newest of them, unless pytest
gets ``--every-etcd``.
"""

from __future__ import annotations

import pytest

from tests.support import suite
from tests.support.servers import EtcdBinary, find_binaries

OPTION = "--every-etcd"
MARK = "every_etcd"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        action="store_true",
        help="run each test that uses an etcd on every version found, not only on the newest",
    )


def versions_for(metafunc: pytest.Metafunc) -> tuple[EtcdBinary, ...]:
    """Return the versions on which a test runs, the newest first; none if no etcd is installed."""
    found = find_binaries()
    if metafunc.config.getoption(OPTION):
        return found
    marked = metafunc.definition.get_closest_marker(MARK) is not None
    return found if marked and suite.with_slow_tests(metafunc.config) else found[:1]
