"""The program: its commands, and which exit code each kind of error has."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from rdzv_etcd.cli import output
from rdzv_etcd.errors import EtcdError, RdzvEtcdError, SettingsError

_INTERRUPTED = 130
_PIPE_CLOSED = 141
_NOT_WRITTEN = 74
"""As in sysexits.h."""


_COMMANDS = (
    *("status", "watch", "history", "doctor"),
    *("close", "drain", "evict", "serve", "demo"),
)
"""In the order in which they are listed; each is in the module of its name, but for this one:"""
_MODULES = {"close": "admin"}
_CODES = (
    (SettingsError, output.BAD_USAGE),
    (EtcdError, output.CANNOT_ASK),
    (RdzvEtcdError, output.NOT_DONE),
)


class Commands(click.Group):
    """Loads the module of a command when it is used: ``serve`` forks, and gRPC has threads."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"rdzv_etcd.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Endpoint, options and secrets are read from the same places as by torchrun.",
)
@click.version_option(package_name="rdzv-etcd", prog_name="rdzv-etcd")
def app() -> None:
    """See and manage the jobs of torchrun --rdzv-backend=etcd3."""


def run(arguments: Sequence[str]) -> int:
    """Run it and return its exit code; an error is one line, or JSON with ``--json``."""
    logging.getLogger("rdzv_etcd").setLevel(logging.ERROR)  # what matters is in the result
    # … but not a wait for a secret or for the first contact, nor an etcd that is passed over.
    for name in (
        "rdzv_etcd.settings.secrets",
        "rdzv_etcd.etcd.first_contact",
        "rdzv_etcd.embedded.binary",
        "rdzv_etcd.embedded.launch",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return _run(arguments)
    except (BrokenPipeError, SystemExit):  # click makes the latter of the former, with 1 in it
        _write_no_more()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno is None:  # not of the system's, but such as a TimeoutError of our own
            raise
        _write_no_more()
        is_closed = error.errno == errno.EBADF  # see __init__.py
        why = "cannot be written: standard output is closed" if is_closed else error
        with contextlib.suppress(OSError):  # it may be standard error that fails
            output.warn(f"rdzv-etcd: {why}")
        return _NOT_WRITTEN


def _run(arguments: Sequence[str]) -> int:
    """Run it, assuming that the output can be written."""
    as_json = "--json" in arguments
    try:
        code = app.main(list(arguments), prog_name="rdzv-etcd", standalone_mode=False)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except click.ClickException as error:
        if not as_json:
            error.show()
            return output.BAD_USAGE
        code, message = output.BAD_USAGE, error.format_message()
    except RdzvEtcdError as error:
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        message = f"{'etcd cannot be asked: ' if code == output.CANNOT_ASK else ''}{error}"
    else:
        return code if isinstance(code, int) else output.DONE
    if as_json:
        output.show_json("error", {"message": message, "exit_code": code})
    else:
        output.warn(f"rdzv-etcd: {message}")
    return int(code)


def _write_no_more() -> None:
    """Keep the flush at exit from failing as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
