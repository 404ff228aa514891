"""A run that asks for late starts gets them in every Python that its tests start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import late_starts

PROGRAM = """
import runpy, sys, time
file = sys.modules["sitecustomize"].__file__
slept = []
time.sleep = slept.append
for _ in range(100):
    runpy.run_path(file)
print(len(slept))
"""


def test_some_processes_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(late_starts.VARIABLE, "0")
    late_starts.ask_for_them()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 100
