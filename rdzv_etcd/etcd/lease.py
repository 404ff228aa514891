"""One shared keep-alive stream for all leases of a client.

Knows the LeaseKeepAlive call. Must not know when to renew a lease, or what it is for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from functools import partial
from typing import Any

from rdzv_etcd.errors import EtcdRefusedError, EtcdUnavailableError
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.channel import ClosedError
from rdzv_etcd.etcd.errors import AttemptError, Verdict, final_error, unavailable
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.retry import KEEP_ALIVE, Deadline, Failover, OpenStream

_log = logging.getLogger("rdzv_etcd")


class KeepAlive:
    """Renews leases over one stream, which is opened on demand and again where it broke."""

    def __init__(self, failover: Failover) -> None:
        self._failover = failover
        self._opening = asyncio.Lock()
        self._live: _Exchange | None = None
        self._refused = False

    async def renew(self, lease_id: int, timeout_s: float) -> int:
        """Return the lease's new TTL, 0 if it is gone.

        Raises :class:`EtcdUnavailableError` if no reply came in time, and authentication errors.
        """
        deadline = Deadline(self._failover.clock, timeout_s)
        try:
            ttl_s = await self._failover.repeat(
                partial(self._attempt, lease_id, deadline),
                lambda failed: failed.fault.verdict in KEEP_ALIVE.repeat_after,
                self._failover.pause(),
                deadline.remaining_s,
            )
            self._refused = False
            return ttl_s
        except AttemptError as failed:
            if failed.fault.verdict is Verdict.FINAL:
                raise final_error(failed, self._failover.user) from None
            raise EtcdUnavailableError(
                f"keep-alive of lease {lease_id:016x} not answered within {timeout_s:g} s: {failed}"
            ) from None

    async def close(self) -> None:
        if self._live is not None:
            await self._live.close()
            self._live = None

    def _note_refusal(self, failed: AttemptError) -> None:
        """Log the first refusal in a row: unlike an outage, it does not pass by itself."""
        error, stale = failed.fault.error, failed.fault.verdict is Verdict.STALE_TOKEN
        if isinstance(error, EtcdRefusedError) and not stale and not self._refused:
            self._refused = True
            _log.warning(
                "%s refuses to renew this node's lease, which expires unless this is fixed: %s",
                failed.endpoint,
                error,
            )

    async def _attempt(self, lease_id: int, deadline: Deadline) -> int:
        limit_s = min(self._failover.attempt_limit_s(KEEP_ALIVE), deadline.remaining_s())
        try:
            exchange = await self._exchange(limit_s)
            return await self._failover.clock.wait_for(
                exchange.ask(lease_id), min(limit_s, deadline.remaining_s())
            )
        except TimeoutError:
            # A connection that swallows requests is not waited for: the lease expires meanwhile.
            fault = unavailable(Verdict.UNKNOWN, "no answer in time")
            if exchange is self._live:
                self._live = None
                await exchange.close()
                self._failover.leave(exchange.opened.server, is_silent=True)
            raise AttemptError(fault, exchange.opened.server.name) from None
        except AttemptError as failed:
            self._note_refusal(failed)
            raise

    async def _exchange(self, limit_s: float) -> _Exchange:
        async with self._opening:
            if self._live is None or self._live.ended:
                opened = await self._failover.open("LeaseKeepAlive", limit_s)
                self._live = _Exchange(self._failover, opened)
            return self._live


class _Exchange:
    """One stream with the requests that wait for a reply on it.

    Replies to the requests of one lease come in their order, so the oldest waiter gets the next
    reply, even if it has given up: a reply must not be taken for a later request's.
    """

    def __init__(self, failover: Failover, opened: OpenStream) -> None:
        self.opened = opened
        self._failover = failover
        self._waiting: defaultdict[int, deque[asyncio.Future[int]]] = defaultdict(deque)
        self._failure: AttemptError | None = None
        self.ended = False
        self._reader: asyncio.Task[None] | None = asyncio.create_task(
            self._read(), name="rdzv-etcd keep-alive replies"
        )

    async def ask(self, lease_id: int) -> int:
        """Send one request and return the TTL in its reply. Raises :class:`AttemptError`."""
        if self._failure is not None:
            raise self._failure
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[lease_id].append(reply)
        self.opened.stream.send(messages.load().LeaseKeepAliveRequest(ID=lease_id))
        return await reply

    async def close(self) -> None:
        """End the task and forget it: a cancelled task keeps the traceback, that the call, and that
        its connection, until the garbage collector runs."""
        self.opened.stream.cancel()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self) -> None:
        stream = self.opened.stream
        try:
            while True:
                message = await stream.read()
                if message is None:
                    raise ClosedError("etcd ended the keep-alive stream")
                self._dispatch(message)
        except (grpc.RpcError, ClosedError) as error:
            self._fail(self._failover.failed(self.opened.server, error, self.opened.metadata))
        finally:
            self.ended = True
            stream.cancel()
            self._fail(
                AttemptError(unavailable(Verdict.UNKNOWN, "closed"), self.opened.server.name)
            )

    def _dispatch(self, message: Any) -> None:
        waiting = self._waiting.get(message.ID)
        if not waiting:
            return
        reply = waiting.popleft()
        if not waiting:
            del self._waiting[message.ID]
        if not reply.done():
            reply.set_result(message.TTL)

    def _fail(self, failure: AttemptError) -> None:
        self._failure = self._failure or failure
        for waiting in self._waiting.values():
            for reply in waiting:
                if not reply.done():
                    reply.set_exception(self._failure)
        self._waiting.clear()
