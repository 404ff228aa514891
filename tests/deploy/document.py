"""docs/deploy.md: the commands it, or another document, shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.markdown import ROOT

DOCUMENT = ROOT / "docs" / "deploy.md"
_COMMANDS = re.compile(
    r"<!-- commands:begin (\S+) -->\n```bash\n(.*?)```\n<!-- commands:end -->\n", re.DOTALL
)


def text(document: Path = DOCUMENT) -> str:
    return document.read_text(encoding="utf-8")


def commands(name: str, document: Path = DOCUMENT) -> str:
    """Return the shell commands of one marked block."""
    (found,) = [match[2] for match in _COMMANDS.finditer(text(document)) if match[1] == name]
    return found
