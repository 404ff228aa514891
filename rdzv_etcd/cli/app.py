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


_PLACES = {
    "status": "status",
    "watch": "watch",
    "history": "history",
    "doctor": "doctor",
    "close": "admin",
    "drain": "drain",
    "evict": "evict",
    "reset": "admin",
    "serve": "serve",
    "demo": "demo",
}
"""Which module each command is in, in the order in which they are listed."""


class Commands(click.Group):
    """Loads the module of a command when it is used: ``serve`` forks, and gRPC has threads."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _PLACES:
            return None
        module = import_module(f"rdzv_etcd.cli.{_PLACES[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Endpoint, options, user and password are taken from the same places as with torchrun.",
)
@click.version_option(package_name="rdzv-etcd", prog_name="rdzv-etcd")
def app() -> None:
    """See and manage the jobs of torchrun --rdzv-backend=etcd3."""


def run(arguments: Sequence[str]) -> int:
    """Run it and return its exit code; an error is one line, or JSON with ``--json``."""
    logging.getLogger("rdzv_etcd").setLevel(logging.ERROR)  # what matters is in the result
    # … but a wait for a secret or for the first contact comes before it, and so does one for an
    # etcd that is no good.
    for name in (
        "rdzv_etcd.settings.secrets",
        "rdzv_etcd.etcd.first_contact",
        "rdzv_etcd.embedded.binary",
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


def _run(arguments: Sequence[str]) -> int:  # noqa: PLR0911 - a table
    """Run it, assuming that the output can be written."""
    try:
        code = app.main(list(arguments), prog_name="rdzv-etcd", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        if "--json" in arguments:
            return _report(error.format_message(), output.BAD_USAGE, arguments)
        error.show()
        return output.BAD_USAGE
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except SettingsError as error:
        return _report(error, output.BAD_USAGE, arguments)
    except EtcdError as error:
        return _report(f"etcd cannot be asked: {error}", output.CANNOT_ASK, arguments)
    except RdzvEtcdError as error:
        return _report(error, output.NOT_DONE, arguments)
    return code if isinstance(code, int) else output.DONE


def _write_no_more() -> None:
    """Keep the flush at exit from failing as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: object, code: int, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        output.show_json("error", {"message": str(error), "exit_code": code})
    else:
        output.warn(f"rdzv-etcd: {error}")
    return code
