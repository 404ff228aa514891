"""``PYTHONPATH`` for what a test starts."""

from __future__ import annotations

import os
from pathlib import Path

EVERY_PYTHON = Path(__file__).with_name("in_every_python")
"""Every Python that finds it imports what is in there."""


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` with these folders first, and with what it had."""
    rest = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *filter(None, [rest])])
