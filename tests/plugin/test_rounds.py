"""``next_rendezvous``: ranks, the master's address, the workers' store, the epoch."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from rdzv_etcd.settings.parse import EPOCH_VARIABLE
from tests.library.nodes import LIMIT_S, RemoteNode, at_once
from tests.plugin.handlers import PluginJob, join_all


def _visit(info: RendezvousInfo) -> tuple[int, int]:
    """Use the round's TCPStore as a worker does."""
    store = TCPStore(*_master(info), is_master=False)
    return store.add("visits", 1), store.num_keys()


def _master(info: RendezvousInfo) -> tuple[str, int]:
    where = info.bootstrap_store_info
    assert where is not None
    return where.master_addr, where.master_port


def test_three_handlers_agree_and_every_round_has_fresh_stores(job: PluginJob) -> None:
    """The agents' store, which all share, and the workers', without a prefix; and a higher epoch,
    which workers get."""
    epochs = []
    with job.handlers(3) as made:
        for _ in range(2):
            infos = join_all(made)
            epochs.append(int(os.environ[EPOCH_VARIABLE]))
            assert sorted(info.rank for info in infos) == [0, 1, 2]
            assert {info.world_size for info in infos} == {3}
            ((address, _),) = {_master(info) for info in infos}
            assert address == "127.0.0.1"
            assert [_visit(info) for info in infos] == [(1, 1), (2, 1), (3, 1)]
            one, two, _ = (info.store for info in infos)
            assert not one.check(["greeting"])
            one.set("greeting", "hello")
            two.set_timeout(timedelta(seconds=LIMIT_S))
            assert two.get("greeting") == b"hello"
            assert [handler.num_nodes_waiting() for handler in made] == [0, 0, 0]
            assert not any(handler.is_closed() for handler in made)
    assert epochs[0] < epochs[1]


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
