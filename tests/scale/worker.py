"""Eight handlers in one process: joins whenever it is told to, reports as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler, create_handler


def main() -> None:
    endpoint, job_id, nodes, threads = sys.argv[1:]
    count = int(threads)
    print("imported", flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "make":
            handlers = [_make(endpoint, job_id, int(nodes)) for _ in range(count)]
            print("made", flush=True)
        elif command == "join":
            with ThreadPoolExecutor(count) as pool:
                print(json.dumps(list(pool.map(_join, handlers))), flush=True)
        elif command == "shutdown":
            with ThreadPoolExecutor(count) as pool:
                print(json.dumps(list(pool.map(lambda h: h.shutdown(), handlers))), flush=True)


def _make(endpoint: str, job_id: str, nodes: int) -> EtcdRendezvousHandler:
    config: dict[str, Any] = {"lease_ttl": 30, "closed_ttl": 5, "ended_ttl": 5}
    return create_handler(
        RendezvousParameters("etcd3", endpoint, job_id, nodes, nodes, "127.0.0.1", **config)
    )


def _join(handler: EtcdRendezvousHandler) -> list[object]:
    called_s = time.monotonic()
    info = handler.next_rendezvous()
    return [called_s, time.monotonic(), info.rank, info.world_size]


if __name__ == "__main__":
    main()
