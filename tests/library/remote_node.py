"""A node in a process of its own: obeys commands, one JSON list a line, and answers in kind.

When its input ends, the program just ends, as a launcher's would: leaving is the library's affair.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.group.group import Group
from rdzv_etcd.settings.config import settings_from_config

COMMANDS: Mapping[str, Callable[..., Any]] = {
    "join": lambda group: asdict(group.join()),
    "waiting_count": lambda group: group.waiting_count(),
    "wait_change": lambda group, timeout_s: group.wait_change(timeout_s),
    "barrier": lambda group, name, timeout_s: group.barrier(name, timeout_s),
    "close": lambda group, reason: group.close(succeeded=False, reason=reason),
    "leave": lambda group: group.leave(),
    "exit": lambda group, status: sys.exit(status),
    "divide": lambda group: 1 / 0,
}


def main() -> None:
    group = Group(settings_from_config(environ=os.environ, **json.loads(sys.argv[1])))
    answer({"result": group.node_id})
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer({"result": COMMANDS[name](group, *arguments)})
        except RdzvEtcdError as error:
            answer({"error": type(error).__name__, "message": str(error)})


def answer(words: Mapping[str, object]) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
