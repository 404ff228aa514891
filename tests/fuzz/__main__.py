"""``python -m tests.fuzz --inputs 100000 [--only NAME]``: bad input for every parser and for nodes.

Exit code 1, the input's number and the traceback if anything but this library's own errors comes
out. The same numbers make the same inputs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.fuzz.targets import COSTLY, TARGETS


def fuzz(name: str, inputs: int, start: int = 0) -> None:
    """Give a parser ``inputs`` bad inputs; raises any error that it must not raise, with a note."""
    for number in range(start, start + inputs):
        try:
            TARGETS[name](random.Random(f"{name} {number}"))
        except Exception as error:
            raise AssertionError(
                f"again: python -m tests.fuzz --only {name!r} --inputs 1 --start {number}"
            ) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each, if they are cheap")
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", help="one parser's name")
    given = parser.parse_args()
    for name in [given.only] if given.only else TARGETS:
        began_s = time.monotonic()
        inputs = max(1, given.inputs // COSTLY.get(name, 1))
        fuzz(name, inputs, given.start)
        took_s = time.monotonic() - began_s
        print(f"{name}: {inputs} inputs in {took_s:.0f} s, only our own errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
