"""The command ``rdzv-etcd``: what an operator sees of a job, and can do to it.

    streams.py     makes standard input, output and error fit to be used, whatever they are
    app.py         the program: its commands, and what its errors become
    options.py     what torchrun is told as well: endpoint, options, job
    output.py      lines, tables and JSON; what others wrote is escaped here
    signals.py     what Ctrl-C and SIGTERM mean while a command runs
    job_view.py    reads a job, in pages
    report.py      what a job's state means to an operator; pure
    status.py, history.py, watch.py, doctor/      these only read
    history_plot.py                               draws the history; the only one with matplotlib
    acting.py, drain.py, evict.py                 these change something, and ask before they do
    one_node.py                                   which node is meant, and news of it
    serve.py, demo.py, demo_training.py           an etcd, and a whole training, on this machine

This module imports nothing of the extra, so that it can say that it is missing.
"""

from __future__ import annotations

import sys

from rdzv_etcd.cli.streams import as_utf8, prepare

NEEDS_EXTRA = 2
"""Exit code without the extra."""


def main() -> int:
    """Run the program with ``sys.argv`` and return its exit code."""
    prepare()
    try:
        import click  # noqa: F401, PLC0415 - see above
        import rich  # noqa: F401, PLC0415
    except ImportError as error:
        sys.stderr.write(
            f"rdzv-etcd needs the package {error.name}: pip install 'rdzv-etcd[cli]'\n"
        )
        return NEEDS_EXTRA
    from rdzv_etcd.cli.app import run  # noqa: PLC0415

    return run([as_utf8(argument) for argument in sys.argv[1:]])
