"""Turns rank 0's bootstrap socket into the round's ``TCPStore``.

Knows torch's constructor and who owns the descriptor; knows nothing of rounds or etcd.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from rdzv_etcd.group.bootstrap import Bootstrap

DEFAULT_TIMEOUT = timedelta(seconds=300)


def serve_tcp_store(bootstrap: Bootstrap, timeout: timedelta = DEFAULT_TIMEOUT) -> TCPStore:
    """Serve a fresh, empty ``TCPStore`` on the socket; clients that connected before are served.

    The descriptor belongs to torch from now on: it closes it, and with it gives the port back, when
    the last reference to the store is gone. Raises ``torch.distributed.DistError``.
    """
    port = bootstrap.port
    return TCPStore(
        # The store's own client: the published address may lead through a NAT that does not
        # lead back, and the socket listens on every address.
        host_name="127.0.0.1",
        port=port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=bootstrap.detach(),
    )
