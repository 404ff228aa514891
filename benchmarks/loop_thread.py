"""An event loop on a thread, for participants whose commands come one by one on the main thread.

Nodes live between the commands as well: they renew leases and follow watches.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopHold:
    """Runs until :meth:`freeze` or the end of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; block until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def freeze(self) -> None:
        """Let nothing on the loop go on: to others it is as if the machine had died."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
