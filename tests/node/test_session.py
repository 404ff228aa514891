"""The session's keep-alive over slow and lossy links, on the in-memory etcd in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rdzv_etcd.node.session import Session
from rdzv_etcd.node.waiting import Wakeup
from rdzv_etcd.testing import (
    Applied,
    MemoryConnection,
    MemoryEtcd,
    SimClock,
    SimLoop,
    run_simulation,
)
from rdzv_etcd.testing.model import RenewLease

TTL_S = 3
PERIOD_S = TTL_S / 3
REPLY_S = TTL_S / 5


class Lab:
    """One session, and when its keep-alives reached the server."""

    def __init__(self, loop: SimLoop, server: MemoryEtcd) -> None:
        self.server = server
        self.etcd: MemoryConnection = server.connect("node")
        self.clock = SimClock(loop)
        self.told: list[str] = []
        self.session = Session(
            self.etcd,
            self.clock,
            Wakeup(self.clock),
            TTL_S,
            REPLY_S,
            warn=self.told.append,
            works=lambda: True,
        )
        self.arrivals_s: list[float] = []
        server.observers.append(self._observe)

    def _observe(self, applied: Applied) -> None:
        if isinstance(applied.request, RenewLease):
            self.arrivals_s.append(applied.at_s)

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.session.run())
        yield
        task.cancel()
        await asyncio.wait({task})
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no renewal outlives the session"


def in_the_lab(test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    async def scenario(loop: SimLoop) -> None:
        async with MemoryEtcd(SimClock(loop), seed=loop.seed) as server:
            await test(Lab(loop, server))

    for seed in range(5):
        run_simulation(scenario, seed)


@pytest.mark.parametrize("one_way_s", [0.001, 0.2, 0.6])
def test_the_next_renewal_does_not_wait_for_the_last_reply(
    one_way_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Even with a round trip longer than the period: the lease does not come to its end."""
    caplog.set_level(logging.INFO)

    async def test(lab: Lab) -> None:
        lab.etcd.link.delay(one_way_s)
        lease_id = await lab.session.open()
        async with lab.running():
            await asyncio.sleep(60)
        assert lab.session.lease_id == lease_id
        assert lab.longest_gap_s == pytest.approx(PERIOD_S)

    in_the_lab(test)
    assert "does not answer" not in caplog.text


def test_a_message_sent_again_by_tcp_delays_nothing_but_itself() -> None:
    """200 ms each way, and every tenth keep-alive needs a second more."""

    async def test(lab: Lab) -> None:
        lab.etcd.link.delay(0.2)
        lease_id = await lab.session.open()
        async with lab.running():
            for _ in range(10):
                lab.etcd.link.hold_requests(1.0, 1, lambda request: isinstance(request, RenewLease))
                await asyncio.sleep(10 * PERIOD_S)
        assert lab.session.lease_id == lease_id
        assert lab.longest_gap_s < 2 * PERIOD_S + 0.01
        assert len(lab.arrivals_s) >= 98

    in_the_lab(test)


def test_while_no_reply_comes_it_asks_more_often() -> None:
    """A connection that swallows requests costs less than the lease's time."""

    async def test(lab: Lab) -> None:
        await lab.session.open()
        async with lab.running():
            await asyncio.sleep(10)
            lab.etcd.link.lose(0.0, 1.0)
            del lab.arrivals_s[:]
            await asyncio.sleep(REPLY_S + PERIOD_S * 1.5)
            assert len(lab.arrivals_s) >= 2
            lab.etcd.link.lose()
            await asyncio.sleep(10)
        assert lab.longest_gap_s <= PERIOD_S + 0.1

    in_the_lab(test)


def test_a_silence_of_etcd_is_told_soon_and_then_rarely_and_its_end_as_well() -> None:
    async def test(lab: Lab) -> None:
        await lab.session.open()
        async with lab.running():
            await asyncio.sleep(10)
            assert not lab.told
            lab.etcd.link.lose(1.0, 1.0)
            await asyncio.sleep(9)
            assert not lab.told
            await asyncio.sleep(400)
            lab.etcd.link.lose()
            await asyncio.sleep(20)
        *silent, back = lab.told
        assert len(silent) == 4  # after 10, 30, 60 and 360 s
        assert all(line.startswith("etcd has not answered for ") for line in silent)
        assert back.startswith("etcd answers again, after 4")

    in_the_lab(test)


def test_a_clock_that_jumps_while_a_reply_comes_moves_etcd_no_farther_away() -> None:
    """Nor does a process that is stopped. Whoever may be gone is waited for four times as long."""

    async def test(lab: Lab) -> None:
        lab.etcd.link.delay(0.01)
        await lab.session.open()
        async with lab.running():
            await asyncio.sleep(PERIOD_S + 0.01)  # a keep-alive is under way
            assert lab.session.round_trip_s < 0.1
            lab.clock.jump(100.0)
            await asyncio.sleep(PERIOD_S)
            assert len(lab.arrivals_s) >= 1
            assert lab.session.round_trip_s < 0.1
            lab.etcd.link.delay(0.25)
            await asyncio.sleep(6 * PERIOD_S)
            assert lab.session.round_trip_s == TTL_S / 10

    in_the_lab(test)
