"""torchrun on a host whose wall clock is wrong: ``wrong_clock.py SECONDS [torchrun's arguments]``.

Only a whole machine has a wall clock of its own (Linux's time namespaces leave it out). So the
agent's own Python gets the wrong time everywhere; its log shows it. The workers, which write the
step log, are processes of their own and have the right one.
"""

from __future__ import annotations

import sys
import time
import types

import grpc.aio  # noqa: F401 - so that it is there below

_SKEW_S = float(sys.argv.pop(1))
_right_s, _right_ns = time.time, time.time_ns

# gRPC's Python part hands deadlines in wall-clock time to its C part, which asks the kernel. On a
# host whose clock is wrong both are wrong in the same way; here both have to stay right.
_right = types.ModuleType("time")
_right.__dict__.update(time.__dict__)
for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "grpc" and getattr(_module, "time", None) is time:
        _module.__dict__["time"] = _right

time.time = lambda: _right_s() + _SKEW_S
time.time_ns = lambda: _right_ns() + int(_SKEW_S * 1e9)

if __name__ == "__main__":
    from torch.distributed.run import main

    main()
