"""Rank 0's listening socket becomes the round's TCPStore."""

from __future__ import annotations

import gc
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from rdzv_etcd.runtime.listener import Listener, LocalAddr, bind_listener
from rdzv_etcd.settings.connection import Endpoint
from rdzv_etcd.torch_plugin.store import serve_tcp_store

LIMIT = timedelta(seconds=60)


def listener() -> Listener:
    return bind_listener(LocalAddr("127.0.0.1"), (Endpoint("127.0.0.1"),))


def connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def open_descriptors() -> int:
    gc.collect()
    return int(psutil.Process().num_fds())


@pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "torch 2.6"])
def test_it_serves_on_the_socket_and_a_client_that_came_before_it(use_libuv: bool) -> None:
    offered = listener()
    with socket.create_connection(("127.0.0.1", offered.port), timeout=10) as early_probe:
        assert early_probe.getpeername()[1] == offered.port
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(lambda: connect(offered.port).get("key"))
        store = serve_tcp_store(offered, use_libuv=use_libuv)
        assert store.port == offered.port
        store.set("key", "value")
        assert early.result(60) == b"value"
    assert connect(offered.port).get("key") == b"value"


def test_every_round_has_a_fresh_store_and_no_descriptor_is_left() -> None:
    def one_round() -> int:
        offered = listener()
        store = serve_tcp_store(offered)
        assert not store.check(["stale"])
        store.set("stale", "1")
        offered.close()  # harmless: the descriptor is torch's by now
        assert store.get("stale") == b"1"
        return offered.port

    one_round()  # what torch opens once and keeps
    gc.collect()  # what other tests of this process have left
    before = open_descriptors()
    for _ in range(5):
        port = one_round()
        gc.collect()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)
    assert open_descriptors() == before


def test_a_socket_serves_only_once() -> None:
    offered = listener()
    store = serve_tcp_store(offered)
    with pytest.raises(ValueError, match="handed over"):
        serve_tcp_store(offered)
    del store
