"""The simulated loop: virtual time, one schedule per seed, nodes that pause and crash."""

from __future__ import annotations

import asyncio
import time

import pytest

from rdzv_etcd.testing import (
    DeadlockError,
    SimClock,
    SimLoop,
    SimulationError,
    SimulationTimeoutError,
    run_simulation,
)


def test_time_jumps_to_the_next_timer() -> None:
    async def scenario(loop: SimLoop) -> float:
        await asyncio.gather(*(asyncio.sleep(hours * 3600) for hours in (1, 5, 3)))
        return loop.time()

    began_s = time.monotonic()
    assert run_simulation(scenario) == 5 * 3600
    assert time.monotonic() - began_s < 60


async def _race(loop: SimLoop) -> list[int]:
    order: list[int] = []

    async def runner(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            order.append(number)
            await asyncio.sleep(loop.rng.random())

    await asyncio.gather(*(runner(number) for number in range(6)))
    return order


def test_one_seed_is_one_schedule() -> None:
    assert run_simulation(_race, 7) == run_simulation(_race, 7)
    assert len({tuple(run_simulation(_race, seed)) for seed in range(20)}) > 10


def test_without_shuffling_callbacks_run_in_the_order_they_were_scheduled() -> None:
    async def scenario(_loop: SimLoop) -> list[int]:
        order: list[int] = []

        async def runner(number: int) -> None:
            order.append(number)

        await asyncio.gather(*(runner(number) for number in range(10)))
        return order

    assert run_simulation(scenario, 3, shuffle=False) == list(range(10))


def test_a_deadlock_names_the_waiting_tasks() -> None:
    async def forgotten() -> None:
        await asyncio.get_running_loop().create_future()

    async def scenario(_loop: SimLoop) -> None:
        await asyncio.create_task(forgotten(), name="the culprit")

    with pytest.raises(DeadlockError, match=r"the culprit: .*forgotten.*test_simloop\.py:\d+"):
        run_simulation(scenario)


def test_simulated_time_is_limited() -> None:
    async def scenario(loop: SimLoop) -> None:
        await _tick(loop, [])

    with pytest.raises(SimulationTimeoutError):
        run_simulation(scenario, limit_s=100)


def test_a_failure_nobody_looked_at_fails_the_simulation() -> None:
    async def broken() -> None:
        raise ValueError("lost")

    async def scenario(_loop: SimLoop) -> None:
        task = asyncio.create_task(broken())
        await asyncio.sleep(1)
        del task

    with pytest.raises(SimulationError, match="lost"):
        run_simulation(scenario)


def test_remaining_tasks_are_ended() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)

    async def scenario(_loop: SimLoop) -> None:
        task = asyncio.create_task(background())
        await asyncio.sleep(1)
        assert not task.done()

    run_simulation(scenario)
    assert ended


async def _tick(loop: SimLoop, ticks: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        ticks.append(loop.time())


def test_a_paused_node_does_nothing_until_it_is_resumed() -> None:
    async def scenario(loop: SimLoop) -> list[float]:
        ticks: list[float] = []
        with loop.node("a"):
            task = asyncio.create_task(_tick(loop, ticks))
        await asyncio.sleep(2.5)
        loop.pause("a")
        await asyncio.sleep(10)
        loop.resume("a")
        await asyncio.sleep(2)
        task.cancel()
        return ticks

    assert run_simulation(scenario) == [1, 2, 12.5, 13.5]


def test_a_crashed_node_runs_no_finally_block_before_the_end() -> None:
    async def scenario(loop: SimLoop) -> None:
        ended = []

        async def node() -> None:
            try:
                await asyncio.sleep(5)
            finally:
                ended.append(loop.time())

        with loop.node("a"):
            task = asyncio.create_task(node())
        await asyncio.sleep(1)
        loop.crash("a")
        task.cancel()
        await asyncio.sleep(100)
        assert not ended

    run_simulation(scenario)


def test_waits_with_a_limit_use_simulated_time() -> None:
    async def scenario(loop: SimLoop) -> None:
        clock = SimClock(loop, offset_s=1000)
        began_s = clock.now_s()
        with pytest.raises(TimeoutError):
            await clock.wait_for(loop.create_future(), 30)
        assert clock.now_s() - began_s == 30
        await clock.sleep(5)
        assert clock.now_s() == 1035

    run_simulation(scenario)


def test_wall_clocks_may_differ_and_jump() -> None:
    async def scenario(loop: SimLoop) -> None:
        true, wrong = SimClock(loop), SimClock(loop, wall_skew_s=3600)
        assert wrong.wall_s() - true.wall_s() == 3600
        wrong.wall_skew_s = -60
        assert wrong.wall_s() - true.wall_s() == -60
        assert wrong.now_s() == true.now_s()

    run_simulation(scenario)


def test_jitter_is_the_same_for_the_same_seed() -> None:
    async def scenario(loop: SimLoop) -> list[float]:
        return [SimClock(loop, seed=name).jitter(1.0) for name in ("a", "b")]

    first, second = run_simulation(scenario, 1)
    assert first != second
    assert run_simulation(scenario, 1) == [first, second]
    assert run_simulation(scenario, 2) != [first, second]


def test_threads_are_refused() -> None:
    async def scenario(_loop: SimLoop) -> None:
        await asyncio.to_thread(time.time)

    with pytest.raises(SimulationError, match="thread"):
        run_simulation(scenario)


def test_many_cancelled_timers_do_not_pile_up() -> None:
    async def scenario(loop: SimLoop) -> None:
        for _ in range(5000):
            future = loop.create_future()
            loop.call_soon(future.set_result, None)
            await asyncio.wait_for(future, 3600)
        assert len(loop._timers) < 500

    run_simulation(scenario)
