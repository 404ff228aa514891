"""``next_rendezvous``: ranks, the master's address, the workers' store, the epoch."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from rdzv_etcd.settings.parse import EPOCH_VARIABLE
from tests.library.nodes import LIMIT_S, RemoteNode, at_once
from tests.plugin.handlers import PluginJob, join_all, run_program

_CLIENT = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=60))
print(store.add("visits", 1), store.num_keys())
"""


def _visit(info: RendezvousInfo) -> tuple[int, int]:
    """Use the round's TCPStore from another process, as a worker does, without a prefix."""
    address, port = _master(info)
    done = run_program(_CLIENT, address, str(port))
    visits, keys = done.stdout.split()
    return int(visits), int(keys)


def _master(info: RendezvousInfo) -> tuple[str, int]:
    where = info.bootstrap_store_info
    assert where is not None
    return where.master_addr, where.master_port


def test_three_handlers_agree(job: PluginJob) -> None:
    with job.handlers(3) as made:
        infos = join_all(made)
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}
        masters = {_master(info) for info in infos}
        assert len(masters) == 1
        assert masters.pop()[0] == "127.0.0.1"
        assert [handler.num_nodes_waiting() for handler in made] == [0, 0, 0]
        assert not any(handler.is_closed() for handler in made)


@pytest.mark.slow
def test_workers_in_other_processes_get_a_fresh_tcp_store_in_every_round(job: PluginJob) -> None:
    with job.handlers(2) as made:
        seen = []
        for _ in range(2):
            info = join_all(made)[0]
            seen.append(_visit(info))
        assert _visit(info) == (seen[1][0] + 1, seen[1][1])
        assert seen[0][0] == seen[1][0] == 1
        assert seen[0] == seen[1]


@pytest.mark.parametrize(("wish", "shared"), [("1", False), ("0", True), (None, True)])
def test_workers_serve_their_own_store_if_torchs_variable_says_so(
    job: PluginJob, monkeypatch: pytest.MonkeyPatch, wish: str | None, shared: bool
) -> None:
    """``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``: the master's port is then free for the worker."""
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    if wish is not None:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", wish)
    with job.handlers(1) as (handler,):
        assert handler.use_agent_store is shared
        address, port = _master(handler.next_rendezvous())
        if shared:
            TCPStore(address, port, is_master=False).set("key", "value")
        else:
            own = TCPStore(address, port, is_master=True, wait_for_workers=False)
            assert own.num_keys() == 0


def test_a_rank_0_elsewhere_serves_nothing_here(job: PluginJob) -> None:
    """A library node and a handler form one round: the protocol is the same."""
    options = job.options("2", rank_key="1")
    with RemoteNode(options) as remote, job.handlers(1, "2", rank_key="2") as (handler,):
        assert remote.node_id
        world, info = at_once([lambda: remote.call("join"), handler.next_rendezvous])
        assert (world["rank"], info.rank) == (0, 1)
        assert info.bootstrap_store_info.master_port == world["master_port"]
        remote.finish()


def test_the_agents_store_is_shared_and_fresh_in_every_round(job: PluginJob) -> None:
    with job.handlers(2) as made:
        for _ in range(2):
            one, two = join_all(made)
            assert not one.store.check(["greeting"])
            one.store.set("greeting", "hello")
            two.store.set_timeout(timedelta(seconds=LIMIT_S))
            assert two.store.get("greeting") == b"hello"


def test_rounds_may_be_joined_from_any_thread(job: PluginJob) -> None:
    """Made in one thread, joined in another, watched from a third. Workers get the epoch."""
    stop = threading.Event()
    seen: set[int] = set()
    epochs = []

    def watch() -> None:
        while not stop.wait(0.01):
            seen.add(made[0].num_nodes_waiting())

    with job.handlers(2) as made, ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for _ in range(3):
                join_all(made)
                epochs.append(int(os.environ[EPOCH_VARIABLE]))
        finally:
            stop.set()
        watching.result(LIMIT_S)
    assert all(count >= 0 for count in seen)
    assert epochs == sorted(set(epochs))
