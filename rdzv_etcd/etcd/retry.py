"""The way to the cluster: several endpoints behind one call, with failover, token and deadline.

Knows endpoints, verdicts, and how often each kind of call is tried. Must not know what
the requests mean. The retry engine is tenacity.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tenacity

from rdzv_etcd.clock import Clock, abandon
from rdzv_etcd.errors import EtcdAuthError, EtcdError, EtcdUnavailableError, OutcomeUnknownError
from rdzv_etcd.etcd.auth import REQUIRE_LEADER, Authenticator
from rdzv_etcd.etcd.channel import ClosedError, LeaderChangedError, Metadata, Server, Stream
from rdzv_etcd.etcd.errors import (
    AttemptError,
    Fault,
    Verdict,
    final_error,
    judge,
    unavailable,
)
from rdzv_etcd.etcd.grpc_start import grpc

FAILBACK_AFTER_S = 300.0
"""The average time between tries to return to the preferred endpoint; each is drawn, so that a
fleet does not come back in step."""
_CONNECT_LIMIT_S = 2.0
"""How long a connection may take while there are other endpoints to turn to."""
_SLOWEST_BYTES_PER_S = 256 * 1024
"""A request is not given up, and sent again, before it has come through at this speed."""
_CANCELLATION_S = 0.01
"""gRPC's core confirms a cancelled call within about 1 ms, to a task of gRPC's own that cannot be
awaited. If the loop were closed before, asyncio would log "Event loop is closed" errors."""
_TOKENS_PER_CALL = 3
"""If tokens are refused this often right after they were issued, they have not just expired."""
_SLOW_S = 1.0
"""A call that takes longer may have been lost with etcd's leader: see `Failover._ask_term`."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class CallKind:
    """A kind of call."""

    name: str
    is_repeatable: bool
    """Whether it is tried again even if the server may have done it."""
    writes: bool
    """Whether the caller must learn of an unknown outcome."""
    attempt_limit_s: float
    """Bounds one attempt, until no endpoint has answered within it: a slow link needs longer for
    large values. A silent connection the keep-alive pings end after 11 s, and etcd itself gives up
    a request after 7 s with default settings."""
    shared_limit_s: float
    """The same if there are other endpoints to turn to. What was under way when etcd's leader died
    is lost, but etcd answers only after its 7 s; the next leader is there within 1 to 2 s, and
    would have answered a request that is sent again, at the latest then (`Failover.note_term`)."""
    is_small: bool = False
    """Whether request and reply are so small that a connection which does not carry them in time is
    given up, even if there is no other endpoint."""


READ = CallKind("read", True, False, 10.0, 3.0)
GUARDED_WRITE = CallKind("guarded write", False, True, 10.0, 10.0)
REPEATABLE_WRITE = CallKind("repeatable write", True, True, 10.0, 3.0)
KEEP_ALIVE = CallKind("keep-alive", True, False, 2.0, 1.5, is_small=True)


class Deadline:
    """A point in time that a call with all its retries must not pass."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.timeout_s = timeout_s
        self._at_s = clock.now_s() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._at_s - self._clock.now_s())


class Pause:
    """How long to wait before the next attempt.

    No wait while there are endpoints left to try; then doubling, with jitter, so that a fleet does
    not come back in step. ``good()`` starts over.
    """

    def __init__(self, clock: Clock, endpoints: int) -> None:
        self._clock = clock
        self._endpoints = endpoints
        self._failures = 0

    def good(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        self._failures += 1
        rounds, within = divmod(self._failures, self._endpoints)
        if within:
            return 0.0
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(rounds - 1, 10))
        return longest / 2 + self._clock.jitter(longest / 2)


@dataclass(slots=True)
class _Call:
    """What has happened to one call so far."""

    kind: CallKind
    method: str
    request: Any
    deadline: Deadline
    endpoints: int
    faults: dict[str, Fault] = field(default_factory=dict)
    """The last fault at each endpoint, the latest one last."""
    failures: int = 0
    unanswered: int = 0
    refused_tokens: int = 0
    maybe_applied: bool = False

    def share_s(self) -> float:
        """Return the time for this attempt that leaves some for the endpoints not yet tried."""
        untried = self.endpoints - self.failures % self.endpoints
        return self.deadline.remaining_s() / untried

    def limit_s(self, limit_s: float) -> float:
        """Return how long the next attempt may take if ``limit_s`` is enough for a small one.

        A large request needs time to be sent. How large a reply will be is unknown; so if no
        endpoint has answered in time, the next attempts may take twice as long.
        """
        sending_s = int(self.request.ByteSize()) / _SLOWEST_BYTES_PER_S
        longer = 2.0 ** min(self.unanswered // self.endpoints, 10)
        return min(longer * (limit_s + sending_s), self.deadline.remaining_s())

    def note(self, failed: AttemptError) -> None:
        fault = failed.fault
        self.failures += 1
        self.unanswered += fault.is_timeout
        self.refused_tokens += fault.verdict is Verdict.STALE_TOKEN
        self.maybe_applied |= self.kind.writes and fault.verdict is Verdict.UNKNOWN
        before = self.faults.pop(failed.endpoint, fault)
        if fault.verdict is Verdict.NOT_DONE and self.deadline.remaining_s() <= 0:
            failed.fault = fault = before  # what went wrong tells more than that time is up
        self.faults[failed.endpoint] = fault

    def may_repeat(self, failed: BaseException) -> bool:
        """Return whether another attempt may help, and is allowed by the time and the kind."""
        if not isinstance(failed, AttemptError) or self.deadline.remaining_s() <= 0:
            return False
        verdict = failed.fault.verdict
        if verdict is Verdict.FINAL or (verdict is Verdict.UNKNOWN and not self.kind.is_repeatable):
            return False
        only_tls = len(self.faults) == self.endpoints and all(
            fault.is_tls for fault in self.faults.values()
        )
        return not only_tls and self.refused_tokens <= _TOKENS_PER_CALL

    def error(self, failed: AttemptError, user: str | None) -> EtcdError:
        """Return what the caller gets after ``failed``, the last attempt."""
        error = self._error(failed, user)
        error.maybe_applied = self.maybe_applied
        return error

    def _error(self, failed: AttemptError, user: str | None) -> EtcdError:
        fault = failed.fault
        closed_in_doubt = self.maybe_applied and isinstance(fault.error, EtcdUnavailableError)
        if fault.verdict is Verdict.FINAL and not closed_in_doubt:
            return final_error(failed, user)
        reasons = {endpoint: fault.reason for endpoint, fault in self.faults.items()}
        history = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
        if self.maybe_applied:
            return OutcomeUnknownError(
                f"the {self.kind.name} ({self.method}) may or may not have been applied: "
                f"{history}. Read before acting"
            )
        if self.refused_tokens > _TOKENS_PER_CALL:
            return EtcdAuthError(f"etcd keeps refusing the tokens it issues: {history}")
        if fault.is_tls:
            return type(fault.error)(f"TLS handshake failed: {history}")
        return EtcdUnavailableError(
            f"etcd did not answer within {self.deadline.timeout_s:g} s: {history}",
            endpoints=reasons,
        )


class Failover:
    """Calls go to the current endpoint until it fails, then to the next one.

    Those on this machine come first, as they are lost only with it; the order of the others is
    drawn, so that a fleet spreads over the members, whichever of them fails. The first endpoint is
    the preferred one: a client that had to leave it returns later, when it answers again. Otherwise
    upgrading the members of a cluster in turn would move all clients to those upgraded first, and
    leave the last one without any.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        auth: Authenticator,
        clock: Clock,
        probe: tuple[str, Any],
        failback_after_s: float = FAILBACK_AFTER_S,
    ) -> None:
        """``probe``: method and request of a read that any member with a leader answers."""
        self._servers = tuple(
            sorted(servers, key=lambda server: (not server.is_near, clock.jitter(1.0)))
        )
        self.auth = auth
        self._current = 0
        self._probe = probe
        self._failback_after_s = failback_after_s
        self._failback: asyncio.Task[None] | None = None
        """Runs while another endpoint than the preferred one is used."""
        self._term = 0
        """The newest of etcd's terms that an answer has shown: a leader has one of its own."""
        self._asking: asyncio.Task[None] | None = None
        """Runs while a call takes long."""
        self._renewing: set[asyncio.Future[None]] = set()
        """Connections that are being given up."""
        self.clock = clock
        self.closed = False

    def __str__(self) -> str:
        return ",".join(server.name for server in self._servers)

    @property
    def has_alternatives(self) -> bool:
        return len(self._servers) > 1

    def pause(self) -> Pause:
        return Pause(self.clock, len(self._servers))

    async def call(self, kind: CallKind, method: str, request: Any, timeout_s: float) -> Any:
        """Make one unary call as its kind allows. Raises only :class:`EtcdError`."""
        deadline = Deadline(self.clock, timeout_s)
        call = _Call(kind, method, request, deadline, len(self._servers))
        pause = self.pause()

        def pause_s(_state: tenacity.RetryCallState | None = None) -> float:
            return min(pause.next_s(), deadline.remaining_s())

        try:
            try:  # most succeed, and tenacity would add a tenth to the cost of a call
                return await self._attempt(call)
            except AttemptError as failed:
                if not call.may_repeat(failed):
                    raise
            await self.clock.sleep(pause_s())
            retrying = tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(call.may_repeat),
                wait=pause_s,
                sleep=self.clock.sleep,
                reraise=True,
            )
            return await retrying(self._attempt, call)
        except AttemptError as failed:
            error = call.error(failed, self.auth.user)
        raise error

    async def open(self, method: str, request: Any, limit_s: float) -> Stream:
        """Open a stream at the current endpoint. Raises :class:`AttemptError`."""
        server = await self._connected(limit_s)
        try:
            metadata = await self.auth.metadata(server, limit_s)
            return server.stream(method, request, metadata=metadata)
        except (AttemptError, ClosedError) as error:
            raise self.failed(server, error) from error

    def failed(
        self,
        server: Server,
        error: BaseException,
        metadata: Metadata | None = None,
        *,
        is_small: bool = False,
        connection: int | None = None,
    ) -> AttemptError:
        """Judge a failure at ``server``, leave it if need be, and return what to raise.

        ``connection``: over which it was asked, if that matters. What was under way when another
        call gave that up shows nothing of the next one.
        """
        if isinstance(error, AttemptError):
            fault = error.fault
        elif isinstance(error, grpc.RpcError):
            fault = judge(error, authenticated=self.auth.can_renew)
        else:
            fault = unavailable(Verdict.UNKNOWN, str(error))
        if fault.verdict is Verdict.STALE_TOKEN:
            if metadata is not None:
                self.auth.refuse(metadata)
        elif (
            fault.verdict is not Verdict.FINAL
            and connection in (None, server.connection)
            and not isinstance(error, LeaderChangedError)  # which says nothing against the server
        ):
            gives_up = self.has_alternatives or is_small
            self.leave(server, is_silent=fault.is_timeout and gives_up)
        return AttemptError(fault, server.name)

    def note_term(self, term: int) -> None:
        """Take note of the term in an answer. If etcd has another leader, make the calls under way
        again: what the one before has not done is lost, and etcd would say so only after 7 s."""
        if term <= self._term:
            return
        is_news, self._term = bool(self._term), term
        if is_news:
            for server in self._servers:
                server.end_repeatable()

    def _ask_term(self) -> None:
        """Have a read show the term, as a call takes long. It is answered as soon as etcd has a
        leader, and a quiet node would not hear of that leader in another way."""
        if self._asking is None and not self.closed:
            self._asking = asyncio.create_task(self._read_term(), name="rdzv-etcd term")

    async def _read_term(self) -> None:
        try:
            with contextlib.suppress(EtcdError):
                await self.call(READ, *self._probe, READ.attempt_limit_s)
        finally:
            self._asking = None

    def leave(self, server: Server, *, is_silent: bool = False) -> None:
        """Turn to the next endpoint, unless that has happened already.

        From one that ``is_silent`` the client moves as a whole: its streams there end, and their
        owners open them again, over a new connection if there is no other endpoint, as several
        members of etcd may be behind one address. Another failure ends the streams by itself, or
        does not concern them.
        """
        if self._servers[self._current] is not server:
            return
        self._current = (self._current + 1) % len(self._servers)
        if self.closed:
            return
        if self._current and self._failback is None:
            self._failback = asyncio.create_task(self._fail_back(), name="rdzv-etcd failback")
        if is_silent:
            renewing = asyncio.ensure_future(server.renew())
            self._renewing.add(renewing)
            renewing.add_done_callback(self._renewing.discard)

    def move(self) -> None:
        """Leave the current endpoint, or at least the connection to it."""
        self.leave(self._servers[self._current], is_silent=True)

    async def close(self) -> None:
        self.closed = True
        await abandon(*filter(None, (self._failback, self._asking)))
        if self._renewing:
            await asyncio.wait(self._renewing)
        for server in self._servers:
            await server.close()
        await self.clock.sleep(_CANCELLATION_S)

    async def _fail_back(self) -> None:
        """Return to the preferred endpoint once it answers.

        The connection to the other one is then given up, and with it the streams, whose owners
        open them again. Calls under way there finish.
        """
        after_s = self._failback_after_s
        try:
            while self._current:
                await self.clock.sleep(after_s / 2 + self.clock.jitter(after_s))
                if self._current and await self._answers(self._servers[0]) and self._current:
                    other, self._current = self._servers[self._current], 0
                    await other.renew()
        finally:
            self._failback = None

    async def _answers(self, server: Server) -> bool:
        method, request = self._probe
        metadata = self.auth.current or REQUIRE_LEADER
        try:
            if not await server.ready(_CONNECT_LIMIT_S):
                return False
            await server.unary(method, request, timeout_s=_CONNECT_LIMIT_S, metadata=metadata)
        except ClosedError:
            return False
        except grpc.RpcError as error:  # refusing the user, or a token, is an answer
            verdict = judge(error, authenticated=self.auth.can_renew).verdict
            return verdict in (Verdict.FINAL, Verdict.STALE_TOKEN)
        return True

    async def _connected(self, limit_s: float) -> Server:
        if self.closed:
            closed = EtcdUnavailableError("the etcd client is closed")
            raise AttemptError(Fault(Verdict.FINAL, "closed", closed), str(self))
        server = self._servers[self._current]
        try:
            if await server.ready(limit_s):
                return server
        except ClosedError as error:
            raise self.failed(server, error) from error
        self.leave(server)
        fault = unavailable(Verdict.NOT_DONE, f"no connection within {limit_s:.1f} s")
        raise AttemptError(fault, server.name)

    async def _attempt(self, call: _Call) -> Any:
        """Send the request once. Raises :class:`AttemptError`, which is noted in ``call``."""
        share_s = call.share_s()
        if call.faults and share_s <= 0:  # time is up; the last fault is more useful than that
            endpoint, fault = next(reversed(call.faults.items()))
            raise AttemptError(fault, endpoint)
        try:
            server = await self._connected(
                min(_CONNECT_LIMIT_S, share_s) if self.has_alternatives else share_s
            )
            metadata: Metadata | None = None
            connection: int | None = None
            try:
                kind = call.kind
                limit_s = kind.shared_limit_s if self.has_alternatives else kind.attempt_limit_s
                metadata = await self.auth.metadata(
                    server, min(limit_s, call.deadline.remaining_s())
                )
                connection = server.connection
                slow = asyncio.get_running_loop().call_later(_SLOW_S, self._ask_term)
                try:
                    reply = await server.unary(
                        call.method,
                        call.request,
                        timeout_s=call.limit_s(limit_s),
                        metadata=metadata,
                        is_repeatable=kind.is_repeatable,
                    )
                finally:
                    slow.cancel()
                self.note_term(reply.header.raft_term)
                return reply
            except (AttemptError, ClosedError, LeaderChangedError, grpc.RpcError) as error:
                small = call.kind.is_small
                raise self.failed(
                    server, error, metadata, is_small=small, connection=connection
                ) from error
        except AttemptError as failed:
            call.note(failed)
            raise
