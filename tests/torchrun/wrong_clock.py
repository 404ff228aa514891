"""torchrun on a host whose wall clock is wrong: ``wrong_clock.py SECONDS [torchrun's arguments]``.

Nothing but a whole machine has a wall clock of its own (Linux's time namespaces leave it out). So
the agent's own Python tells it the wrong time, from before anything else is imported. The workers,
who write the step log, have the right one.
"""

from __future__ import annotations

import sys
import time

_SKEW_S = float(sys.argv.pop(1))
_right_s, _right_ns = time.time, time.time_ns

time.time = lambda: _right_s() + _SKEW_S
time.time_ns = lambda: _right_ns() + int(_SKEW_S * 1e9)

if __name__ == "__main__":
    from torch.distributed.run import main

    main()
