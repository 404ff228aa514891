"""torchrun whose main thread can be wedged: ``wedged.py FIFO [torchrun's arguments]``.

On SIGUSR2 the agent's main thread reads a FIFO, and so does nothing else until a test writes to
it, as when it hangs in a file system. All other threads of the process continue.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from torch.distributed.run import main

if __name__ == "__main__":
    fifo = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR2, lambda *_: fifo.read_text())
    main()
