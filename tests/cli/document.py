"""Keeps the help texts in docs/cli.md those of the program.

.venv/bin/python -m tests.cli.document      writes them
"""

from __future__ import annotations

import re
from copy import copy
from itertools import compress
from pathlib import Path

import click

from rdzv_etcd.cli.app import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
_BLOCK = re.compile(r"(<!-- help:(\S+):begin -->\n).*?(<!-- help:end -->)", re.DOTALL)


_COMMON = {"endpoint", "conf", "job_id", "as_json"}


def help_of(name: str) -> str:
    """What ``rdzv-etcd NAME --help`` prints, 100 columns wide, but for the options of all commands;
    these for ``common``."""
    settings = {**app.context_settings, "terminal_width": 100}
    parent = click.Context(app, info_name="rdzv-etcd", **settings)
    given = app.get_command(parent, "status" if name == "common" else name)
    assert given is not None
    command = copy(given)
    command.add_help_option = False
    shown = [(param.name in _COMMON) == (name == "common") for param in given.params]
    command.params = list(compress(given.params, shown))
    context = click.Context(command, info_name=name, parent=parent, **settings)
    if name != "common":
        return command.get_help(context)
    formatter = context.make_formatter()
    command.format_options(context, formatter)
    return formatter.getvalue().strip()


def renewed(text: str) -> str:
    """The document with the help texts as they are now."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}```\n{help_of(found[2])}\n```\n{found[3]}"

    return _BLOCK.sub(block, text)


def documented(text: str) -> list[str]:
    return [found[2] for found in _BLOCK.finditer(text)]


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
