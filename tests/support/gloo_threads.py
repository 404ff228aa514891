"""No program may exit with threads of gloo's left.

One that has a tensor to give back needs the interpreter for that; when that is ending, it aborts
the process (exit code -6), after all has gone well. It is a race that hardly any run loses, so
tests look for the threads themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.python_path import EVERY_PYTHON, python_path


@contextmanager
def none_left_behind(folder: Path) -> Iterator[None]:
    """What is started meanwhile, with this process's environment, leaves none when it exits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RDZV_ETCD_TEST_EXITS", str(folder))
        patch.setenv("PYTHONPATH", python_path(EVERY_PYTHON))
        yield
    left = "".join(file.read_text() for file in folder.iterdir())
    assert not left, f"these exited with threads of gloo's left:\n{left}"
