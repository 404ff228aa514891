"""A node in a process of its own, only as far as links go: prints its port, and lives.

python -m tests.peers.other_node ADDRESS JOB NODE_ID [fork | exec | watch PORT NODE_ID]
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from rdzv_etcd.peers import Answer, Peer
from rdzv_etcd.peers.tcp import TcpPeers


async def main(address: str, job: str, node_id: str, *more: str) -> None:
    peers = TcpPeers()
    listener = socket.create_server((address, 0))
    peers.listen_on(listener)
    await peers.admit(Peer(job, node_id))
    if more[:1] == ("watch",):
        contact = await peers.connect(address, int(more[1]), Peer(job, more[2]), 30.0)
        assert contact.answer is Answer.SAME, contact
    print(peers.port, flush=True)
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, told.set)
    await told.wait()
    child = 0
    if more[:1] == ("fork",):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    if more[:1] == ("exec",):
        child = (await asyncio.create_subprocess_exec("sleep", "1000", close_fds=False)).pid
    print(child, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
