"""A node in a process of its own: works like a launcher's agent, and logs the worlds it is in.

It joins, works until :meth:`World.wait_over` returns, and joins again, until it is stopped. Its one
argument is JSON with ``log``, ``options`` (of ``settings_from_config``) and ``hold``. Each line of
the log is one JSON object, see ``nodes.Entry``. SIGUSR1 lets a held node join.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World


class Log:
    """Appends one line per event."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **details: object) -> None:
        line = {"event": event, "at_s": time.monotonic(), **details}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


def work(group: Group, log: Log) -> None:
    """Join and work until an exception ends it."""
    while True:
        log.write("join")
        world = group.join()
        log.write("world", **described(world))
        world.wait_over()
        log.write("change", waiting=group.waiting_count())


def described(world: World) -> dict[str, object]:
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


def stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    told = json.loads(sys.argv[1])
    log = Log(Path(told["log"]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGTERM, stop)
    try:
        with Group(settings_from_config(environ=os.environ, **told["options"])) as group:
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
