"""The parts of the documents that are made from the code: help texts, errors, options.

.venv/bin/python -m tests.packaging.generated      writes them
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from copy import copy
from itertools import compress

import click

from rdzv_etcd import errors
from rdzv_etcd.cli.app import app
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings.options import options_table
from tests.support.markdown import documents

_BLOCK = re.compile(
    r"(<!-- ((help):(\S+)|errors|options):begin -->\n).*?(<!-- (?:help|errors|options):end -->)",
    re.DOTALL,
)
_COMMON = {"endpoint", "conf", "job_id", "as_json"}


def blocks(text: str) -> list[str]:
    """The names of a document's generated parts, such as ``help:status``."""
    return [found[2] for found in _BLOCK.finditer(text)]


def renewed(text: str) -> str:
    """The document with these parts as they are now."""

    def block(found: re.Match[str]) -> str:
        if found[3]:
            made = f"```\n{help_of(found[4])}\n```"
        elif found[2] == "errors":
            made = "```text\n{}\n```".format("\n".join(_branch(RdzvEtcdError, 0)))
        else:
            made = options_table().strip()
        return f"{found[1]}{made}\n{found[5]}"

    return _BLOCK.sub(block, text)


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


def error_classes() -> list[type[RdzvEtcdError]]:
    """In the order of the module."""
    found = (thing for thing in vars(errors).values() if inspect.isclass(thing))
    return [thing for thing in found if issubclass(thing, RdzvEtcdError)]


def _branch(kind: type[RdzvEtcdError], depth: int) -> Iterator[str]:
    """A class and, below it, those whose first base it is."""
    also = ", ".join(base.__name__ for base in kind.__bases__[1:])
    yield f"{'    ' * depth}{kind.__name__}{f' (also {also})' if also else ''}"
    for other in error_classes():
        if other.__bases__[0] is kind:
            yield from _branch(other, depth + 1)


if __name__ == "__main__":
    for document in documents():
        document.path.write_text(renewed(document.text), encoding="utf-8")
