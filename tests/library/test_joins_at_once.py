"""One node joins once at a time; whoever calls ``join`` a second time meanwhile is told."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rdzv_etcd import Left
from rdzv_etcd.errors import JoinTimeoutError, MisuseError
from tests.library.nodes import LIMIT_S, Job, at_once, join_all, wait_until, when_entered
from tests.support.signals import handling


def test_a_second_join_meanwhile_is_refused_and_harms_nothing(job: Job) -> None:
    with job.groups(2) as (one, other), ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.join)
        place = job.root + b"nodes/" + one.node_id.encode()
        wait_until("it has arrived", lambda: job.server.keys(place))
        for _ in range(2):
            with pytest.raises(MisuseError, match=f"joining job '{job.id}' already"):
                one.join()
        assert other.join().size == 2
        assert first.result(LIMIT_S).round == 1
        assert (one.waiting_count(), other.waiting_count()) == (0, 0)


def test_a_join_that_was_called_wrongly_lets_no_other_begin(job: Job) -> None:
    with job.groups(2) as (one, other), ThreadPoolExecutor(1) as pool:
        first = pool.submit(one.join)
        place = job.root + b"nodes/" + one.node_id.encode()
        wait_until("it has arrived", lambda: job.server.keys(place))
        with pytest.raises(TypeError):
            one.join(until="tomorrow")  # type: ignore[call-arg]
        with pytest.raises(MisuseError, match=f"joining job '{job.id}' already"):
            one.join(1.0)
        assert other.join().size == 2
        assert first.result(LIMIT_S).round == 1


def test_a_join_that_is_interrupted_when_it_is_done_leaves_the_world(job: Job) -> None:
    """Nobody would work in it. The others are told at once, and the node may join again."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    main = threading.get_ident()
    with (
        job.groups(2) as (one, other),
        ThreadPoolExecutor(1) as pool,
        handling(signal.SIGUSR1, interrupt),
    ):
        joining = pool.submit(other.join)
        with (
            when_entered(one._part.node, lambda: signal.pthread_kill(main, signal.SIGUSR1)),
            pytest.raises(KeyboardInterrupt),
        ):
            one.join()
        world = joining.result(LIMIT_S)
        assert world.wait_over(LIMIT_S)
        assert world.change == Left({one.node_id: "was interrupted in its join: KeyboardInterrupt"})
        worlds = join_all([one, other])
        at_once([partial(world.barrier, "all", LIMIT_S) for world in worlds])


def test_a_node_may_join_again_after_a_join_that_failed(job: Job) -> None:
    with job.groups(2) as nodes:
        with pytest.raises(JoinTimeoutError):
            nodes[0].join(0.3)
        assert [world.round for world in join_all(nodes)] == [1, 1]
