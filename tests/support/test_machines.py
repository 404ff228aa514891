"""Nodes that stall, and machines that are suspended."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.machines import MachineClock, MachineLoop, run_on_machines


def test_a_stalled_node_stops_between_two_lines_and_all_others_go_on() -> None:
    async def scenario(loop: MachineLoop) -> list[str]:
        lines: list[str] = []
        clock = MachineClock(loop)

        async def looks() -> None:
            began_s = clock.now_s()
            ended_s = clock.now_s()  # no await between the two
            lines.append(f"a {began_s:g} to {ended_s:g}")

        async def ticks(name: str) -> None:
            while True:
                await asyncio.sleep(4)
                lines.append(f"{name} {loop.time():g}")

        tasks = [asyncio.create_task(ticks("b"))]
        clock.stall(2, 10)
        assert clock.now_s() == 0  # that was no node
        with loop.node("a"):
            tasks.append(asyncio.create_task(ticks("a")))
            await asyncio.sleep(1)
            tasks.append(asyncio.create_task(looks()))
        await asyncio.sleep(10.5)
        for task in tasks:
            task.cancel()
        return lines

    assert run_on_machines(scenario) == ["b 4", "b 8", "a 1 to 11", "a 11"]


def test_a_node_that_is_paused_or_crashes_while_it_is_stalled_does_not_go_on_by_itself() -> None:
    async def scenario(loop: MachineLoop) -> None:
        clocks = {name: MachineClock(loop) for name in "ab"}
        ended: list[tuple[str, float]] = []

        async def looks(name: str) -> None:
            ended.append((name, clocks[name].now_s()))

        for name, clock in clocks.items():
            clock.stall(1, 10)
            with loop.node(name):
                loop.create_task(looks(name))
        await asyncio.sleep(5)
        loop.pause("a")
        loop.crash("b")
        await asyncio.sleep(15)
        assert ended == []
        loop.resume("a")
        await asyncio.sleep(5)
        assert ended == [("a", 20)]

    for seed in range(5):
        run_on_machines(scenario, seed)


@pytest.mark.parametrize("counts", [True, False])
def test_timers_of_a_suspended_machine_stand_still_and_its_clock_need_not(counts: bool) -> None:
    async def scenario(loop: MachineLoop) -> None:
        clock = MachineClock(loop, counts_suspension=counts)
        with loop.node("a"):
            sleeping = asyncio.ensure_future(asyncio.sleep(10))
        began_s = clock.now_s()
        await asyncio.sleep(4)
        loop.suspend("a")
        await asyncio.sleep(100)
        assert not sleeping.done()
        loop.resume("a")  # of a pause that began before, for instance
        clock.woke(loop.wake("a"))
        assert clock.now_s() - began_s == (104 if counts else 4)
        await asyncio.sleep(5.9)
        assert not sleeping.done()
        await asyncio.sleep(0.2)
        assert sleeping.done()

    run_on_machines(scenario)
