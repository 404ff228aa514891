"""``MemoryConnection``: the port, over a simulated link.

Knows what a client knows: replies, deadlines, broken connections. It does not look at the
server's state except through requests that arrive there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from rdzv_etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    LeaseExistsError,
    OutcomeUnknownError,
)
from rdzv_etcd.etcd.port import Get, GetResult, LeaseGrant, LeaseLeft, Txn, TxnResult
from rdzv_etcd.etcd.watch_check import WatchCheck
from rdzv_etcd.testing.checks import check_types
from rdzv_etcd.testing.model import (
    Grant,
    RenewLease,
    Request,
    Response,
    Revoke,
    TimeToLive,
)
from rdzv_etcd.testing.network import Delivery, Link, Planned, Server
from rdzv_etcd.testing.watch import MemoryWatch

ATTEMPT_TIMEOUT_S = 5.0
"""How long a call that may be repeated waits for one reply before it is sent again."""


@dataclass(frozen=True, slots=True)
class _MemoryCall:
    request: Request
    repeatable: bool
    deadline_s: float
    """On the event loop's clock."""


class _ConnectionBrokenError(Exception):
    """The connection broke, or no reply came, after the request was sent."""


class MemoryConnection:
    """One client's connection; implements :class:`rdzv_etcd.etcd.port.Etcd`."""

    def __init__(self, server: Server, link: Link, name: str, request_timeout_s: float) -> None:
        self.link = link
        self.name = name
        self._server = server
        self._request_timeout_s = request_timeout_s
        self._closed = False
        self._watches: list[MemoryWatch] = []
        self.watch_health = WatchCheck(
            server.clock, lambda: tuple(self._watches), self._read, self.link.move
        )

    def __repr__(self) -> str:
        return f"<MemoryConnection {self.name}>"

    # -- the port ---------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    async def get(self, request: Get, *, timeout_s: float | None = None) -> GetResult:
        return cast(GetResult, await self._call(request, timeout_s, repeatable=True))

    async def txn(
        self, request: Txn, *, timeout_s: float | None = None, repeatable: bool = False
    ) -> TxnResult:
        check_types(request)
        repeatable = repeatable or request.reads_only
        return cast(TxnResult, await self._call(request, timeout_s, repeatable=repeatable))

    async def grant(
        self, ttl_s: int, *, lease_id: int = 0, timeout_s: float | None = None
    ) -> LeaseGrant:
        request = Grant(ttl_s, lease_id)
        return cast(LeaseGrant, await self._call(request, timeout_s, repeatable=True))

    async def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:
        return bool(await self._call(Revoke(lease_id), timeout_s, repeatable=True))

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        return cast(int, await self._call(RenewLease(lease_id), timeout_s, repeatable=True))

    async def time_to_live(
        self, lease_id: int, *, timeout_s: float | None = None
    ) -> LeaseLeft | None:
        answer = await self._call(TimeToLive(lease_id), timeout_s, repeatable=True)
        return cast("LeaseLeft | None", answer)

    def watch(
        self,
        key: bytes,
        range_end: bytes | None = None,
        *,
        start_revision: int,
        puts_only: bool = False,
        mark_resumes: bool = False,
    ) -> MemoryWatch:
        self._require_open()
        watch = MemoryWatch(
            self._server,
            self,
            (key, range_end),
            start_revision,
            puts_only=puts_only,
            mark_resumes=mark_resumes,
        )
        self._watches.append(watch)
        self.watch_health.begin()
        return watch

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.watch_health.stop()
        for watch in list(self._watches):
            await watch.close()
        self._server.connections.remove(self)
        self.link.changed()

    # -- for the server and watches ---------------------------------------------------------------

    @property
    def passing(self) -> bool:
        """Whether a message would reach the other side now."""
        return self._server.up and not self.link.cut

    def pump_watches(self) -> None:
        """Hand new changes to the watches."""
        for watch in list(self._watches):
            watch.pump()

    async def _read(self, request: Get, timeout_s: float) -> GetResult:
        return await self.get(request, timeout_s=timeout_s)

    def forget(self, watch: MemoryWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    # -- calls ------------------------------------------------------------------------------------

    async def _call(
        self, request: Request, timeout_s: float | None, *, repeatable: bool
    ) -> Response:
        self._require_open()
        limit_s = self._request_timeout_s if timeout_s is None else timeout_s
        call = _MemoryCall(request, repeatable, asyncio.get_running_loop().time() + limit_s)
        doubtful = False
        while True:
            try:
                response = await self._try(call)
                # A lease found gone at another attempt was revoked by an earlier one.
                return True if doubtful and isinstance(request, Revoke) else response
            except LeaseExistsError:
                if not (doubtful and isinstance(request, Grant)):
                    raise
                lease = self._server.model.leases[request.lease_id]
                return LeaseGrant(request.lease_id, lease.ttl_s, self._server.revision)
            except EtcdError as error:
                raise _final_error(request, error, doubtful=doubtful) from None
            except _ConnectionBrokenError as error:
                if not repeatable:
                    raise OutcomeUnknownError(
                        f"{_kind(request)} sent, but {error}: it may have been applied"
                    ) from None
                doubtful = True
                if self._closed or self._left_s(call) <= 0:
                    gone = EtcdUnavailableError(f"{_kind(request)} failed: {error}")
                    raise _final_error(request, gone, doubtful=True) from None

    async def _try(self, call: _MemoryCall) -> Response:
        """Send once, to a server that can be reached, and return the reply."""
        await self._connected(call)
        fault = self.link.next_fault(call.request)
        if fault.error is not None:
            raise fault.error
        if fault.stall_s:
            await asyncio.sleep(fault.stall_s)
            await self._connected(call)
        return await self._attempt(call, fault)

    async def _connected(self, call: _MemoryCall) -> None:
        """Wait until the server can be reached; a silent cut is not noticed here."""
        while not self._server.up or (self.link.cut and not self.link.silent):
            left_s = self._left_s(call)
            if left_s <= 0:
                raise EtcdUnavailableError(
                    f"{_kind(call.request)} failed: no etcd endpoint could be reached in time"
                )
            await asyncio.wait((self.link.change(),), timeout=left_s)
            self._require_open()

    async def _attempt(self, call: _MemoryCall, fault: Planned) -> Response:
        """Send once and wait for the reply, for a broken connection, or for the time to pass."""
        server, link = self._server, self.link
        reply: asyncio.Future[Response | EtcdError] = asyncio.get_running_loop().create_future()
        cuts = link.cuts

        def arrive() -> None:
            if cuts != link.cuts or not self.passing or link.request_lost():
                return
            hangs = link.hangs and not isinstance(call.request, RenewLease)
            outcome = self._apply(call.request)
            if hangs:
                return
            if fault.again_s is not None and call.repeatable:
                server.call_later(fault.again_s, again)
            if fault.fate is Delivery.REPLY_LOST:
                link.cuts += 1
                link.changed()
            elif not link.reply_lost():
                server.call_later(link.draw_delay_s(), lambda: answer(outcome))

        def again() -> None:
            if server.up and not self._closed:
                self._apply(call.request)

        def answer(outcome: Response | EtcdError) -> None:
            if cuts == link.cuts and self.passing and not reply.done():
                reply.set_result(outcome)

        if fault.fate is not Delivery.REQUEST_LOST:
            server.call_later(fault.delay_s + link.draw_delay_s(), arrive)
        outcome = await self._reply(
            call, reply, cuts, known_lost=fault.fate is Delivery.REQUEST_LOST
        )
        if isinstance(outcome, EtcdError):
            raise outcome
        return outcome

    def _apply(self, request: Request) -> Response | EtcdError:
        if self._server.overloaded and isinstance(request, RenewLease):
            return EtcdUnavailableError("etcd is overloaded: it renews no lease")
        if self.link.refusal is not None and not isinstance(request, RenewLease):
            return self.link.refusal()
        try:
            self._server.check_permission(request)
            return self._server.apply(request, self.name)
        except EtcdError as error:
            return error

    async def _reply(
        self,
        call: _MemoryCall,
        reply: asyncio.Future[Response | EtcdError],
        cuts: int,
        *,
        known_lost: bool,
    ) -> Response | EtcdError:
        loop = asyncio.get_running_loop()
        give_up_s = call.deadline_s
        if call.repeatable and not known_lost:
            give_up_s = min(give_up_s, loop.time() + ATTEMPT_TIMEOUT_S)
        while not reply.done():
            left_s = give_up_s - loop.time()
            if left_s <= 0:
                if known_lost:
                    raise EtcdUnavailableError(f"{_kind(call.request)} reached no etcd server")
                if cuts == self.link.cuts:
                    self.link.move()
                raise _ConnectionBrokenError("no reply came in time")
            change = self.link.change()
            await asyncio.wait((reply, change), timeout=left_s, return_when="FIRST_COMPLETED")
            if reply.done():
                break
            if self._closed:
                raise _ConnectionBrokenError("the connection was closed")
            if cuts != self.link.cuts and not known_lost:
                raise _ConnectionBrokenError("the connection broke")
        return reply.result()

    def _left_s(self, call: _MemoryCall) -> float:
        return call.deadline_s - asyncio.get_running_loop().time()

    def _require_open(self) -> None:
        if self._closed:
            raise EtcdUnavailableError("the connection to etcd was closed")


def _kind(request: Request) -> str:
    return type(request).__name__.lower()


def _final_error(request: Request, error: EtcdError, *, doubtful: bool) -> EtcdError:
    """Return the error of a call; ``doubtful``: an earlier attempt may have been applied."""
    if not doubtful or _leaves_nothing(request):
        return error
    if isinstance(error, EtcdUnavailableError):
        return OutcomeUnknownError(f"{_kind(request)} may or may not have been applied: {error}")
    error.maybe_applied = True
    return error


def _leaves_nothing(request: Request) -> bool:
    """Whether it does not matter if it reached a server."""
    if isinstance(request, Txn):
        return request.reads_only
    if isinstance(request, Grant):
        return not request.lease_id  # that lease is unknown to all
    return isinstance(request, (Get, TimeToLive, RenewLease))
