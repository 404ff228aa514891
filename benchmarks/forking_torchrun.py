"""The traced torchrun, whose process forks every ten seconds; each child lives for five.

For what a program does that uses torch's launcher as a library: a fork inherits every descriptor.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.run import main

from benchmarks.traced_torchrun import trace


def _fork_for_ever() -> None:
    while True:
        time.sleep(10.0)
        child = os.fork()
        if child == 0:
            time.sleep(5.0)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    trace(Path(sys.argv[1]))
    threading.Thread(target=_fork_for_ever, daemon=True).start()
    main(sys.argv[2:])
