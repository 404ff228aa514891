"""A node in a process of its own: obeys commands, one JSON list a line, and answers in kind.

When its input ends, the program just ends, as a launcher's would: leaving is the library's affair.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World


class Remote:
    """What can be asked for, by name."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._world: World | None = None

    @property
    def world(self) -> World:
        assert self._world is not None, "it has not joined"
        return self._world

    def join(self) -> dict[str, object]:
        self._world = self.group.join()
        return {
            "rank": self.world.rank,
            "size": self.world.size,
            "epoch": self.world.epoch,
            "master_port": self.world.master.port,
        }

    def waiting_count(self) -> int:
        return self.group.waiting_count()

    def wait_over(self, timeout_s: float) -> bool:
        return self.world.wait_over(timeout_s)

    def barrier(self, name: str, timeout_s: float) -> None:
        self.world.barrier(name, timeout_s)

    def exchange(self, text: str) -> list[str]:
        return [one.decode() for one in self.world.exchange(text.encode())]

    def data(self) -> list[object]:
        return [dict(member.data) for member in self.world.members]

    def fail(self, reason: str) -> bool:
        return self.group.fail(reason)

    def leave(self) -> None:
        self.group.leave()

    def exit(self, status: int) -> None:
        sys.exit(status)

    def divide(self) -> None:
        raise ZeroDivisionError


def main() -> None:
    if "log" in sys.argv:
        logging.basicConfig(level=logging.INFO)
    remote = Remote(Group(settings_from_config(environ=os.environ, **json.loads(sys.argv[1]))))
    answer({"result": remote.group.node_id})
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer({"result": getattr(remote, name)(*arguments)})
        except RdzvEtcdError as error:
            answer({"error": type(error).__name__, "message": str(error)})


def answer(words: Mapping[str, object]) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
