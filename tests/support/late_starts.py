"""Late starts: what a busy machine does to a few processes of a run, done on purpose to many.

With ``RDZV_ETCD_TEST_LATE_S`` in the environment every second Python that a test starts sleeps
first, for up to so many seconds. A test that fails then has taken an order of events for granted.
"""

from __future__ import annotations

import os

from tests.support.python_path import EVERY_PYTHON, python_path

VARIABLE = "RDZV_ETCD_TEST_LATE_S"


def ask_for_them() -> None:
    """Pass the wish on to what is started from here, if this process was told of it."""
    if VARIABLE in os.environ:
        os.environ["PYTHONPATH"] = python_path(EVERY_PYTHON)
