"""``is_closed()`` and ``set_closed()`` of handlers that are in no round (any more)."""

from __future__ import annotations

import logging

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from tests.library.nodes import wait_until
from tests.plugin.handlers import PluginJob, join_all, leave


def test_a_handler_that_has_not_joined_sees_that_the_job_is_closed(job: PluginJob) -> None:
    """Whether it was made before or after; a run that it begins itself is not closed."""
    with job.handlers(2, "1:2", last_call_timeout=1) as (member, before):
        member.next_rendezvous()
        assert not before.is_closed()
        member.set_closed()
        wait_until("the end", before.is_closed)
        leave(member)
        after = job.handler()
        try:
            assert after.is_closed()
            assert after.num_nodes_waiting() == 0
            after.next_rendezvous()
            assert not after.is_closed()
        finally:
            leave(after)


def test_a_handler_that_has_not_joined_can_close_the_job(job: PluginJob) -> None:
    with job.handlers(2) as members:
        join_all(members)
        outsider = job.handler("2")
        outsider.set_closed()
        assert outsider.is_closed()
        for member in members:
            wait_until("the end", member.is_closed)
            told = f"{job.id}.*closed by .* s ago.*closed by the launcher"
            with pytest.raises(RendezvousClosedError, match=told):
                member.next_rendezvous()
        members[0].set_closed()  # again: nothing happens
        assert outsider.shutdown()


def test_where_no_round_was_formed_nothing_is_closed_and_that_is_said(
    job: PluginJob, caplog: pytest.LogCaptureFixture
) -> None:
    handler = job.handler()
    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        handler.set_closed()
    assert "not closed: no round was formed" in caplog.text
    assert not handler.is_closed()
    assert not handler.shutdown()
    assert not job.left()


def test_after_shutdown_closing_does_nothing(job: PluginJob) -> None:
    with job.handlers(2, "1:2") as (going, staying):
        join_all([going, staying])
        leave(going)
        going.set_closed()
        assert not going.is_closed()
        assert staying.next_rendezvous().world_size == 1
        assert not staying.is_closed()
        assert staying.shutdown()
        staying.set_closed()
        assert staying.is_closed()
