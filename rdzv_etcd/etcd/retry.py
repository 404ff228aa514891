"""The way to the cluster: several endpoints behind one call, with failover, token and deadline.

Knows endpoints, verdicts, and how often each kind of call is tried. Must not know what is asked of
etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

import tenacity

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import EtcdAuthError, EtcdError, EtcdUnavailableError, OutcomeUnknownError
from rdzv_etcd.etcd.auth import REQUIRE_LEADER, Authenticator
from rdzv_etcd.etcd.channel import ClosedError, Metadata, Server, Stream
from rdzv_etcd.etcd.errors import AttemptError, Fault, Verdict, judge, told, unavailable
from rdzv_etcd.etcd.grpc_start import grpc

P = ParamSpec("P")
T = TypeVar("T")
Policy: TypeAlias = tenacity.AsyncRetrying

_NOT_DONE = frozenset({Verdict.NOT_SENT, Verdict.REFUSED, Verdict.STALE_TOKEN})

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call."""

    name: str
    repeat_after: frozenset[Verdict]
    """After which verdicts it is tried again."""
    writes: bool
    """Whether an unknown outcome must be told to the caller."""
    attempt_limit_s: float
    """Bounds one attempt, until no endpoint has answered within it: a slow link needs longer for
    large values. A silent connection the keep-alive pings end after 11 s, and etcd itself gives up
    a request after 7 s with default settings."""
    shared_limit_s: float
    """The same if there are other endpoints to turn to. What was under way when etcd's leader died
    is lost, but etcd answers only after its 7 s; the next leader is there within 1 to 2 s, and
    would have answered a request that is sent again."""


READ = Kind("read", _NOT_DONE | {Verdict.UNKNOWN}, False, 10.0, 3.0)
GUARDED_WRITE = Kind("guarded write", _NOT_DONE, True, 10.0, 10.0)
REPEATABLE_WRITE = Kind("repeatable write", _NOT_DONE | {Verdict.UNKNOWN}, True, 10.0, 3.0)
UNCLAIMED_GRANT = Kind("lease grant", _NOT_DONE | {Verdict.UNKNOWN}, False, 10.0, 3.0)
"""Of a lease whose id nobody has yet: one that is left behind carries nothing, and expires."""
KEEP_ALIVE = Kind("keep-alive", _NOT_DONE | {Verdict.UNKNOWN}, False, 2.0, 1.5)


class Deadline:
    """A point in time that a call with all its retries must not pass."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.timeout_s = timeout_s
        self._at_s = clock.now_s() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._at_s - self._clock.now_s())


class Pause:
    """Tells how long to wait before the next attempt.

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


async def attempts(
    policy: Callable[[], Policy],
    attempt: Callable[P, Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Make the first attempt, and let ``policy`` decide about others if it fails.

    The policy comes in only then: most attempts succeed at once, and it costs as much as they do.
    """
    try:
        return await attempt(*args, **kwargs)
    except AttemptError as failed:
        failures = [failed]

    async def again(*args: P.args, **kwargs: P.kwargs) -> T:
        if failures:
            raise failures.pop()
        return await attempt(*args, **kwargs)

    return await policy()(again, *args, **kwargs)


def bounded(
    kind: Kind, deadline: Deadline, pause: Pause, clock: Clock, give_up: Callable[[], bool]
) -> Policy:
    """Return the policy of one call: until it succeeds, its kind forbids it, or time is up."""
    return tenacity.AsyncRetrying(
        sleep=clock.sleep,
        retry=tenacity.retry_if_exception(
            lambda error: (
                isinstance(error, AttemptError) and error.fault.verdict in kind.repeat_after
            )
        ),
        stop=lambda _state: deadline.remaining_s() <= 0 or give_up(),
        wait=lambda _state: min(pause.next_s(), deadline.remaining_s()),
        reraise=True,
    )


def endless(pause: Pause, clock: Clock) -> Policy:
    """Return the policy of a watch: it outlives every outage, and ends with any other error."""
    return tenacity.AsyncRetrying(
        sleep=clock.sleep,
        retry=tenacity.retry_if_exception(
            lambda error: (
                isinstance(error, AttemptError) and error.fault.verdict is not Verdict.FINAL
            )
        ),
        stop=tenacity.stop_never,
        wait=lambda _state: pause.next_s(),
        reraise=True,
    )


FAILBACK_AFTER_S = 300.0
"""The average time between tries; each is drawn, so that a fleet does not come back in step."""


class Failback:
    """A task of its own while the client is away; without tasks when it is at home."""

    def __init__(
        self, clock: Clock, after_s: float, go_home: Callable[[], Awaitable[bool]]
    ) -> None:
        """``go_home`` tries to move and tells whether the client is at home now."""
        self._clock = clock
        self._after_s = after_s
        self._fail_back = go_home
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The client is away; idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rdzv-etcd failback")

    async def close(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            await self._pause()
            while not await self._fail_back():
                await self._pause()
        finally:
            self._task = None

    async def _pause(self) -> None:
        await self._clock.sleep(self._after_s / 2 + self._clock.jitter(self._after_s))


_CONNECT_LIMIT_S = 2.0
"""How long a connection may take while there are other endpoints to turn to."""
_SLOWEST_BYTES_PER_S = 256 * 1024
"""A request is not given up, and sent again, before it has come through at this speed."""
_CANCELLATION_S = 0.01
"""gRPC's core confirms a cancelled call within about 1 ms, to a task of gRPC's own that nobody can
wait for. If the loop were closed before, asyncio would log "Event loop is closed" errors."""
_TOKENS_PER_CALL = 3
"""If tokens are refused this often right after they were issued, they have not just expired."""


@dataclass(slots=True)
class _Call:
    """What has happened to one call so far."""

    kind: Kind
    method: str
    request: Any
    deadline: Deadline
    endpoints: int
    faults: dict[str, Fault] = field(default_factory=dict)
    """The last fault at each endpoint."""
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

        A large request needs time to be sent. How large a reply is nobody knows; so if no endpoint
        has answered in time, the next attempts may take twice as long.
        """
        sending_s = int(self.request.ByteSize()) / _SLOWEST_BYTES_PER_S
        longer = 2.0 ** min(self.unanswered // self.endpoints, 10)
        return min(longer * (limit_s + sending_s), self.deadline.remaining_s())

    def hopeless(self) -> bool:
        """Tell whether more attempts within the deadline make no sense."""
        everywhere_tls = len(self.faults) == self.endpoints and all(
            fault.is_tls for fault in self.faults.values()
        )
        return everywhere_tls or self.refused_tokens > _TOKENS_PER_CALL

    def note(self, endpoint: str, fault: Fault) -> None:
        self.faults[endpoint] = fault
        self.failures += 1
        self.unanswered += fault.is_timeout
        self.refused_tokens += fault.verdict is Verdict.STALE_TOKEN
        self.maybe_applied |= self.kind.writes and fault.verdict is Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    message: Any
    error: EtcdError | None
    doubtful: bool
    """Whether an attempt before the last may have been applied as well."""

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.message


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream just opened, with where and under which token."""

    server: Server
    metadata: Metadata
    stream: Stream


class Failover:
    """Calls go to the current endpoint until it fails, then to the next one.

    The order is drawn, so that a fleet spreads over the members, whichever of them fails. The first
    one is home: a client that was driven away comes back later, when home answers again.
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
        self._servers = _shuffled(servers, clock)
        self._auth = auth
        self._current = 0
        self._probe = probe
        self._failback = Failback(clock, failback_after_s, self._fail_back)
        self._renewing: set[asyncio.Future[None]] = set()
        """Connections that are being given up."""
        self.clock = clock
        self.closed = False

    def __str__(self) -> str:
        return ",".join(server.name for server in self._servers)

    def pause(self) -> Pause:
        return Pause(self.clock, len(self._servers))

    @property
    def has_alternatives(self) -> bool:
        return len(self._servers) > 1

    def attempt_limit_s(self, kind: Kind) -> float:
        """Return how long one attempt of a small request may take."""
        return kind.shared_limit_s if self.has_alternatives else kind.attempt_limit_s

    async def call(self, kind: Kind, method: str, request: Any, timeout_s: float) -> Any:
        """Make one unary call as its kind allows. Raises only :class:`EtcdError`."""
        return (await self.call_noting_doubt(kind, method, request, timeout_s)).result()

    async def call_noting_doubt(
        self, kind: Kind, method: str, request: Any, timeout_s: float
    ) -> Outcome:
        """Make one unary call; tell also whether an earlier attempt may have been applied."""
        deadline = Deadline(self.clock, timeout_s)
        call = _Call(kind, method, request, deadline, len(self._servers))

        def policy() -> Policy:
            return bounded(kind, deadline, self.pause(), self.clock, call.hopeless)

        try:
            message = await attempts(policy, self._attempt, call)
            return Outcome(message, None, call.maybe_applied)
        except AttemptError as failed:
            error = _last_word(call, failed, self.user)
            error.maybe_applied = call.maybe_applied
            return Outcome(None, error, call.maybe_applied)

    async def open(self, method: str, limit_s: float) -> OpenStream:
        """Open a stream at the current endpoint. Raises :class:`AttemptError`."""
        server = await self._connected(limit_s)
        try:
            metadata = await self._auth.metadata(server, limit_s)
            return OpenStream(server, metadata, server.stream(method, metadata=metadata))
        except (AttemptError, ClosedError) as error:
            raise self.failed(server, error) from error

    def is_current(self, opened: OpenStream) -> bool:
        """Tell whether :meth:`open` would choose the same endpoint and token now."""
        same_server = self._servers[self._current] is opened.server
        return same_server and self._auth.current is opened.metadata

    def failed(
        self, server: Server, error: BaseException, metadata: Metadata | None = None
    ) -> AttemptError:
        """Draw the consequences of a failure at ``server`` and return it judged."""
        if isinstance(error, AttemptError):
            fault = error.fault
        elif isinstance(error, grpc.RpcError):
            fault = judge(error, authenticated=self._auth.can_renew)
        else:
            fault = unavailable(Verdict.UNKNOWN, str(error))
        if fault.verdict is Verdict.STALE_TOKEN:
            if metadata is not None:
                self._auth.refuse(metadata)
        elif fault.verdict is not Verdict.FINAL:
            self.leave(server, is_silent=fault.is_timeout and self.has_alternatives)
        return AttemptError(fault, server.name)

    def leave(self, server: Server, *, is_silent: bool = False) -> None:
        """Turn to the next endpoint, unless that has happened already.

        From one that ``is_silent`` the client moves as a whole: its streams there end, and their
        owners open them again, over a new connection if there is no other endpoint, as several
        members of etcd may be behind one address. Another failure ends the streams by itself, or
        does not concern them.
        """
        if self._servers[self._current] is server:
            self._current = (self._current + 1) % len(self._servers)
            if self._current and not self.closed:
                self._failback.begin()
            if is_silent and not self.closed:
                renewing = asyncio.ensure_future(server.renew())
                self._renewing.add(renewing)
                renewing.add_done_callback(self._renewing.discard)

    def move(self) -> None:
        """Leave the current endpoint, or at least the connection to it."""
        self.leave(self._servers[self._current], is_silent=True)

    @property
    def user(self) -> str | None:
        return self._auth.user

    @property
    def can_renew_token(self) -> bool:
        return self._auth.can_renew

    async def close(self) -> None:
        self.closed = True
        await self._failback.close()
        if self._renewing:
            await asyncio.wait(self._renewing)
        for server in self._servers:
            await server.close()
        await self.clock.sleep(_CANCELLATION_S)

    async def _fail_back(self) -> bool:
        """Move to the first endpoint if it answers; tell whether the current one is that now.

        Then the connection to the other one is given up, and with it the streams, which are opened
        again at home. Calls under way there go on.
        """
        if not self._current or not await self._answers(self._servers[0]):
            return not self._current
        away, self._current = self._servers[self._current], 0
        await away.renew()
        return not self._current

    async def _answers(self, server: Server) -> bool:
        method, request = self._probe
        metadata = self._auth.current or REQUIRE_LEADER
        try:
            if not await server.ready(_CONNECT_LIMIT_S):
                return False
            await server.unary(method, request, timeout_s=_CONNECT_LIMIT_S, metadata=metadata)
        except ClosedError:
            return False
        except grpc.RpcError as error:  # refusing the user, or a token, is an answer
            verdict = judge(error, authenticated=self._auth.can_renew).verdict
            return verdict in (Verdict.FINAL, Verdict.STALE_TOKEN)
        return True

    async def _connected(self, limit_s: float) -> Server:
        if self.closed:
            fault = Fault(
                Verdict.FINAL, "closed", EtcdUnavailableError("the etcd client is closed")
            )
            raise AttemptError(fault, str(self))
        server = self._servers[self._current]
        try:
            if await server.ready(limit_s):
                return server
        except ClosedError as error:
            raise self.failed(server, error) from error
        self.leave(server)
        fault = unavailable(Verdict.NOT_SENT, f"no connection within {limit_s:.1f} s")
        raise AttemptError(fault, server.name)

    async def _attempt(self, call: _Call) -> Any:
        try:
            return await self._send(call)
        except AttemptError as failed:
            call.note(failed.endpoint, failed.fault)
            raise

    async def _send(self, call: _Call) -> Any:
        share_s = call.share_s()
        if call.failures and share_s <= 0:  # the policy stops after this
            raise AttemptError(next(reversed(call.faults.values())), next(reversed(call.faults)))
        server = await self._connected(
            min(_CONNECT_LIMIT_S, share_s) if self.has_alternatives else share_s
        )
        metadata: Metadata | None = None
        try:
            limit_s = self.attempt_limit_s(call.kind)
            metadata = await self._auth.metadata(server, min(limit_s, call.deadline.remaining_s()))
            return await server.unary(
                call.method,
                call.request,
                timeout_s=call.limit_s(limit_s),
                metadata=metadata,
            )
        except (AttemptError, ClosedError, grpc.RpcError) as error:
            raise self.failed(server, error, metadata) from error


def _shuffled(servers: Sequence[Server], clock: Clock) -> tuple[Server, ...]:
    left, order = list(servers), []
    while left:
        order.append(left.pop(int(clock.jitter(len(left)))))
    return tuple(order)


def _last_word(call: _Call, failed: AttemptError, user: str | None) -> EtcdError:
    """Return what the caller is told when the policy gives up."""
    fault = failed.fault
    closed_in_doubt = call.maybe_applied and isinstance(fault.error, EtcdUnavailableError)
    if fault.verdict is Verdict.FINAL and not closed_in_doubt:
        return told(failed, user)
    history = "; ".join(f"{endpoint}: {fault.reason}" for endpoint, fault in call.faults.items())
    if call.maybe_applied:
        return OutcomeUnknownError(
            f"the {call.kind.name} ({call.method}) may or may not have been applied: {history}. "
            "Read before acting"
        )
    if call.refused_tokens > _TOKENS_PER_CALL:
        return EtcdAuthError(f"etcd keeps refusing the tokens it issues: {history}")
    if fault.is_tls:
        return type(fault.error)(f"TLS handshake failed: {history}")
    return EtcdUnavailableError(
        f"etcd did not answer within {call.deadline.timeout_s:g} s: {history}",
        endpoints={endpoint: fault.reason for endpoint, fault in call.faults.items()},
    )
