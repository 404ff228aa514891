"""One node joins once at a time; whoever calls ``join`` a second time meanwhile is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rdzv_etcd.errors import JoinTimeoutError, MisuseError
from tests.library.nodes import LIMIT_S, groups, join_all, node_settings, wait_until
from tests.support.leaks import LeakCheck, job_root
from tests.support.servers import EtcdServer


def test_a_second_join_meanwhile_is_refused_and_harms_nothing(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    settings = node_settings(etcd_server, job_id, "2")
    with groups(settings, 2) as (one, other), ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.join)
        place = job_root(job_id) + b"nodes/" + one.node_id.encode()
        wait_until("it has arrived", lambda: etcd_server.keys(place))
        for _ in range(2):
            with pytest.raises(MisuseError, match=f"joining job '{job_id}' already"):
                one.join()
        assert other.join().size == 2
        assert first.result(LIMIT_S).round == 1
        assert (one.waiting_count(), other.waiting_count()) == (0, 0)


def test_a_node_may_join_again_after_a_join_that_failed(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with groups(node_settings(etcd_server, job_id, "2"), 2) as nodes:
        with pytest.raises(JoinTimeoutError):
            nodes[0].join(0.3)
        assert [world.round for world in join_all(nodes)] == [1, 1]
