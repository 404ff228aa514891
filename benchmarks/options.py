"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


class UnusableError(Exception):
    """What was asked for cannot be measured here; the message says what is missing."""


class DefaultsHelp(argparse.HelpFormatter):
    """Help texts with their defaults, as they would be typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, "", argparse.SUPPRESS) or isinstance(default, bool):
            return action.help
        typed = ",".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {typed})".replace("%", "%%")


def numbers(text: str) -> list[int]:
    """``2,8,32`` as positive numbers."""
    return [count(part) for part in text.split(",")]


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def folder(text: str) -> Path:
    """A folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def names(*known: str) -> Callable[[str], list[str]]:
    """A comma-separated choice of ``known``."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return chosen

    return parse


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every measuring command has: where results go, and which etcd it starts."""
    parser.add_argument("--json", type=Path, help="write the result with all samples here")
    parser.add_argument("--plot", type=Path, help="write a plot here (svg, png, pdf)")
    parser.add_argument("--etcd", type=Path, help="etcd binary (default: the newest installed)")
    parser.add_argument(
        "--data", type=folder, default=Path("/var/tmp"), help="where etcd's data go; a real disk"
    )
    parser.add_argument(
        "--no-fsync",
        dest="fsync",
        action="store_false",
        help="let etcd not wait for the disk; such numbers are not comparable",
    )


def as_json(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a run without paths of the machine."""
    hidden = ("json", "plot", "etcd", "data", "environments", "command", "main")
    return {name: value for name, value in vars(args).items() if name not in hidden}
