"""etcd loses its data while torch's agents assign ranks (``_assign_worker_ranks``)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.library.nodes import LIMIT_S, wait_until
from tests.plugin.handlers import PluginJob, join_all

ROLES = [f"torchelastic/role_info/{rank}" for rank in range(2)]


def test_agents_whose_ranks_are_lost_join_again(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    root = job.root
    with job.handlers(2) as made, ThreadPoolExecutor(1) as pool:
        by_rank = {info.rank: info.store for info in join_all(made)}
        by_rank[0].set(ROLES[0], json.dumps({"rank": 0, "local_world_size": 2}))
        reading = pool.submit(by_rank[0].multi_get, ROLES)
        record = job.server.gateway.keys(root)[root + b"ctl/round"]
        job.server.gateway.revoke(record.lease_id)
        by_rank[1].set(ROLES[1], json.dumps({"rank": 1, "local_world_size": 2}))
        assert len(reading.result(LIMIT_S)) == 2
        by_rank[0].multi_set(  # type: ignore[attr-defined] # torch's stubs lack it
            ["torchelastic/assigned_ranks/1"], ["[0, 4, 0, 4]"]
        )
        assert json.loads(by_rank[1].get("torchelastic/assigned_ranks/1"))[1] == 4
        assert "joins again" in caplog.text
        wait_until("both to re-join", lambda: all(one.num_nodes_waiting() for one in made))
        assert {info.world_size for info in join_all(made)} == {2}
        assert [one.num_nodes_waiting() for one in made] == [0, 0]
