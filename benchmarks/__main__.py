"""``python -m benchmarks COMMAND``: the command line. Loads only what the command needs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.options import DefaultsHelp, UnusableError

COMMANDS = {
    "latency": "from the last node's arrival to all nodes holding their ranks",
    "peers": "the same of torchft, LM Resiliency and NVIDIA's extension, each as it installs",
    "agent": "what the plugin costs in the agent and in the workers",
    "store": "the stores' operations, and what torch's agents do with them",
    "recovery": "what a death, a signal, a newcomer or a crash costs a real job",
    "false-alarms": "what a training notices of disturbances in which nobody is lost",
    "scale": "what a round, a loss and idling cost with up to 10,000 simulated nodes",
    "gpu": "from launch to the first allreduce, and after a kill, on CUDA (or CPU)",
    "report": "write the tables and plots of the committed results into the documents",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=DefaultsHelp
        )
        if arguments[:1] == [name]:
            module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(main=module.run)
    args = parser.parse_args(arguments)
    try:
        document = args.main(args)
    except UnusableError as error:
        parser.exit(2, f"error: {error}\n")
    if isinstance(document, dict):
        from benchmarks import report  # noqa: PLC0415 - it imports every benchmark

        print(report.shown(args.command, document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
