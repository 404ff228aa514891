"""``is_closed()`` and ``set_closed()`` of handlers that are in no round (any more)."""

from __future__ import annotations

import logging

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import wait_until
from tests.plugin.handlers import handlers, join_all, leave, parameters
from tests.support.leaks import LeakCheck, left_of_job
from tests.support.servers import EtcdServer


def test_a_handler_that_has_not_joined_sees_that_the_job_is_closed(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    """Whether it was made before or after; a run that it begins itself is not closed."""
    with handlers(etcd_server, job_id, "1:2", 2, last_call_timeout=1) as (member, before):
        member.next_rendezvous()
        assert not before.is_closed()
        member.set_closed()
        wait_until("the end", before.is_closed)
        leave(member)
        after = create_handler(parameters(etcd_server, job_id, "1"))
        try:
            assert after.is_closed()
            assert after.num_nodes_waiting() == 0
            after.next_rendezvous()
            assert not after.is_closed()
        finally:
            leave(after)


def test_a_handler_that_has_not_joined_can_close_the_job(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with handlers(etcd_server, job_id, "2", 2) as members:
        join_all(members)
        outsider = create_handler(parameters(etcd_server, job_id, "2"))
        outsider.set_closed()
        assert outsider.is_closed()
        for member in members:
            wait_until("the end", member.is_closed)
            with pytest.raises(RendezvousClosedError, match="closed by the launcher"):
                member.next_rendezvous()
        assert outsider.shutdown()


def test_where_no_round_was_formed_nothing_is_closed_and_that_is_said(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    handler = create_handler(parameters(etcd_server, job_id, "1"))
    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        handler.set_closed()
    assert "not closed: no round was formed" in caplog.text
    assert not handler.is_closed()
    assert not handler.shutdown()
    assert not left_of_job(etcd_server.gateway, job_id)


def test_after_shutdown_closing_does_nothing(
    leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str
) -> None:
    with handlers(etcd_server, job_id, "1:2", 2) as (going, staying):
        join_all([going, staying])
        leave(going)
        going.set_closed()
        assert not going.is_closed()
        assert staying.next_rendezvous().world_size == 1
        assert not staying.is_closed()
        assert staying.shutdown()
        staying.set_closed()
        assert staying.is_closed()
