"""Several nodes in one process, whose links can be reset: obeys lines, answers in JSON."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rdzv_etcd.peers import tcp
from rdzv_etcd.settings.parse import settings_from_config
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: a socket that is closed sends RST."""


def main() -> None:
    options, count = json.loads(sys.argv[1]), int(sys.argv[2])
    nodes: list[Group] = []
    worlds: list[World] = []
    answer([])
    for line in sys.stdin:
        match line.strip():
            case "make":
                settings = settings_from_config(environ={}, **options)
                nodes = [Group(settings) for _ in range(count)]
                answer([node.node_id for node in nodes])
            case "join":
                with ThreadPoolExecutor(count) as pool:
                    joins = list(pool.map(join, nodes))
                worlds = [world for world, _, _ in joins]
                answer([[world.rank, world.size, *times] for world, *times in joins])
            case "reset":
                answer([nodes[0]._part.run(reset(node)) for node in nodes])
            case "look":
                seen = zip(nodes, worlds, strict=True)
                answer([[world.over, str(world.change), watched(node)] for node, world in seen])
            case "leave":
                with ThreadPoolExecutor(count) as pool:
                    answer(list(pool.map(Group.leave, nodes)))


def join(node: Group) -> tuple[World, float, float]:
    """Join; return also when that began and ended."""
    began_s = time.monotonic()
    world = node.join()
    return world, began_s, time.monotonic()


def answer(words: list[Any]) -> None:
    print(json.dumps(words), flush=True)


def links(node: Group) -> list[Any]:
    network = node._part.network
    assert isinstance(network, tcp.TcpPeers)
    return [
        link for link in tuple(network._links) if link._answered.done() and not link._end.done()
    ]


def watched(node: Group) -> list[str]:
    """The node ids to which a node has links that were answered."""
    return [link._peer.node_id for link in links(node)]


async def reset(node: Group) -> int:
    """Reset every link of the node, at its own end; return how many."""
    open_ones = links(node)
    for link in open_ones:
        sock = link._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        link._transport.abort()
    return len(open_ones)


if __name__ == "__main__":
    main()
