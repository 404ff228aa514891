"""A node in a process of its own: works like a launcher's agent, and writes down all it is told.

It joins, works until :meth:`World.wait_over` returns, joins again, until it is told to stop. It
takes one argument, JSON with ``log``, ``options`` (of ``settings_from_config``), ``hold`` and
``wall_skew_s``. Each line of the log is one JSON object, see ``nodes.Entry``.

Signals: SIGUSR1 lets a held node join; SIGUSR2 makes it try to close the job as failed; SIGTERM
ends it as a job scheduler does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World


class WrongClock(SystemClock):
    """A host whose wall clock is wrong."""

    def __init__(self, skew_s: float) -> None:
        super().__init__()
        self._skew_s = skew_s

    def wall_s(self) -> float:
        return super().wall_s() + self._skew_s


class Log:
    """Appends one line an event, whole, from any thread."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **details: object) -> None:
        line = {"event": event, "at_s": time.monotonic(), **details}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


def work(group: Group, log: Log) -> None:
    """Join and work, for ever; ends by an exception."""
    while True:
        log.write("join")
        world = group.join()
        log.write("world", **told(world))
        world.wait_over()
        log.write("change", waiting=group.waiting_count())


def told(world: World) -> dict[str, object]:
    """The world as JSON."""
    return {
        "round": world.round,
        "rank": world.rank,
        "size": world.size,
        "epoch": world.epoch,
        "members": world.node_ids,
        "master_address": world.master.address,
        "master_port": world.master.port,
    }


def try_to_close(group: Group, log: Log) -> None:
    log.write("closing")
    try:
        group.fail("a node that acts on the round it knows")
    except RdzvEtcdError as error:
        log.write("not closed", error=type(error).__name__, message=str(error))
    else:
        log.write("closed")


def stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    told = json.loads(sys.argv[1])
    log = Log(Path(told["log"]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGTERM, stop)
    try:
        settings = settings_from_config(environ=os.environ, **told["options"])
        with Group(settings, clock=WrongClock(told["wall_skew_s"])) as group:
            signal.signal(
                signal.SIGUSR2,
                lambda *_: threading.Thread(target=try_to_close, args=(group, log)).start(),
            )
            log.write("started", node_id=group.node_id)
            if told["hold"]:
                signal.sigwait({signal.SIGUSR1})
            work(group, log)
    except RdzvEtcdError as error:
        log.write("error", error=type(error).__name__, message=str(error))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
