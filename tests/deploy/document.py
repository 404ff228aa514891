"""docs/deploy.md: the files it shows and the commands it, or another document, tells to run.

``python -m tests.deploy.document`` puts the files' present text into the document.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.deploy.examples import ROOT

DOCUMENT = ROOT / "docs" / "deploy.md"
_FILE = re.compile(r"(<!-- file:begin (\S+) -->\n)(.*?)(<!-- file:end -->\n)", re.DOTALL)
_COMMANDS = re.compile(
    r"<!-- commands:begin (\S+) -->\n```bash\n(.*?)```\n<!-- commands:end -->\n", re.DOTALL
)


def text(document: Path = DOCUMENT) -> str:
    return document.read_text(encoding="utf-8")


def shown_files() -> list[Path]:
    return [ROOT / match[2] for match in _FILE.finditer(text())]


def with_files(document: str) -> str:
    """Return the document with every file it shows as it is now."""

    def show(match: re.Match[str]) -> str:
        path = ROOT / match[2]
        language = "yaml" if path.suffix == ".yaml" else "bash"
        return f"{match[1]}```{language}\n{path.read_text(encoding='utf-8')}```\n{match[4]}"

    return _FILE.sub(show, document)


def commands(name: str, document: Path = DOCUMENT) -> str:
    """Return the shell commands of one marked block."""
    (found,) = [match[2] for match in _COMMANDS.finditer(text(document)) if match[1] == name]
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(with_files(text()), encoding="utf-8")
