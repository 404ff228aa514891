"""Keeps the help texts in docs/cli.md those of the program.

.venv/bin/python -m tests.cli.document      writes them
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from rdzv_etcd.cli.app import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
_BLOCK = re.compile(r"(<!-- help:(\S+):begin -->\n).*?(<!-- help:end -->)", re.DOTALL)


def help_of(name: str) -> str:
    """What ``rdzv-etcd NAME --help`` prints, 100 columns wide."""
    settings = {**app.context_settings, "terminal_width": 100}
    parent = click.Context(app, info_name="rdzv-etcd", **settings)
    command = app.get_command(parent, name)
    assert command is not None
    return command.get_help(click.Context(command, info_name=name, parent=parent, **settings))


def renewed(text: str) -> str:
    """The document with the help texts as they are now."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}```\n{help_of(found[2])}\n```\n{found[3]}"

    return _BLOCK.sub(block, text)


def documented(text: str) -> list[str]:
    return [found[2] for found in _BLOCK.finditer(text)]


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
