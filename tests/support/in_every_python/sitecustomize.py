"""Every Python that a test starts imports this, if the test or the whole run asks for it.

When one of them exits with threads of gloo's left, after all has gone well, it leaves a file: see
:mod:`tests.support.gloo_threads`. Some of them start late: see :mod:`tests.support.suite`.
"""

import atexit
import os
import random
import sys
import time
from pathlib import Path
from typing import NoReturn

_exit = sys.exit
_codes: list[object] = []


def exit_and_note(code: int | str | None = None) -> NoReturn:  # also multiprocessing's, at an error
    _codes.append(code)
    _exit(code)


def tell_of_gloo() -> None:
    folder = os.environ.get("RDZV_ETCD_TEST_EXITS")
    has_failed = hasattr(sys, "last_value") or any(_codes)
    if folder is None or "torch" not in sys.modules or has_failed:
        return
    names = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            names.append((thread / "comm").read_text().strip())
        except OSError:  # it has just ended
            continue
    if found := sorted(name for name in names if "gloo" in name):
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode()
        Path(folder, f"{os.getpid()}").write_text(f"{command}: {', '.join(found)}\n")


late_s = os.environ.get("RDZV_ETCD_TEST_LATE_S")
if late_s is not None and random.random() < 0.5:
    time.sleep(random.uniform(0.0, float(late_s)))

sys.exit = exit_and_note
atexit.register(tell_of_gloo)
