"""Turns rank 0's listening socket into the round's ``TCPStore``.

Knows torch's constructor and who owns the descriptor; knows nothing of rounds or etcd.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from rdzv_etcd.runtime.listener import Listener

_TIMEOUT = timedelta(seconds=300)


def serve_tcp_store(listener: Listener, *, use_libuv: bool = True) -> TCPStore:
    """Serve a fresh, empty ``TCPStore`` on the socket; clients that connected before are served.

    The descriptor belongs to torch from now on: it closes it, and with it gives the port back, when
    the last reference to the store is gone. ``use_libuv`` asks for torch's newer server, which in
    torch 2.6 cannot be given a socket; there it is the older one, as without it. Raises
    ``torch.distributed.DistError``.
    """
    descriptor = listener.detach()
    try:
        return _serve(listener, descriptor, use_libuv=use_libuv)
    except NotImplementedError:  # torch 2.6; it has not touched the socket yet
        return _serve(listener, descriptor, use_libuv=False)


def _serve(listener: Listener, descriptor: int, *, use_libuv: bool) -> TCPStore:
    return TCPStore(
        host_name=listener.own_address,  # for the store's own client
        port=listener.port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=use_libuv,
    )
