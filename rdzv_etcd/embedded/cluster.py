"""Keeps one seat of an embedded cluster: the supervisor's side of :mod:`rdzv_etcd.embedded.seat`.

Supervisors exchange one line of JSON each way, again and again; etcd is asked over its JSON
gateway. One thread, but for look-ups of names; standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from rdzv_etcd.clock import wait_for
from rdzv_etcd.embedded import request
from rdzv_etcd.embedded.child import EtcdProcess, Plan, StartError, lease_age_s
from rdzv_etcd.embedded.seat import (
    SUPERVISORS,
    ClusterOrder,
    Decision,
    Do,
    Entry,
    Member,
    Place,
    Report,
    Step,
    View,
    can_be_spared,
    decide,
    free_seats,
    next_step,
    report_from,
    retired_url,
)
from rdzv_etcd.trust import in_memory, tls_context, without_zone

HEARD_S = 2.0
"""A seat that has been silent for so long counts as not there."""
BLIND_S = 600.0
"""A member without a leader cannot see whether it is used: it stays so much longer."""
_IDLE_S, _BUSY_S = 0.5, 0.1
_PAUSE_S = 2.0
"""What a pause of this process, however long, counts for."""
_ASK_LIMIT_S = 2.0
_IDLE_LIMIT_S = 10.0
_HANDSHAKE_LIMIT_S = 2.0
"""Who does not speak TLS is not kept for asyncio's minute: it may be many."""
_LONGEST_LINE = 1 << 16
_MOST_CONNECTIONS = 256
_HEALTHY_AFTER_S = 60.0
_LONGEST_PAUSE_S = 30.0
_Opening: TypeAlias = "Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]"
_REQUESTS = {Step.REMOVE: "remove", Step.RETIRE: "update", Step.PROMOTE: "promote"}


class SeatSupervisor:
    """Runs a seat until nobody uses the cluster, or a signal asks for its end."""

    def __init__(self, order: ClusterOrder, plan: Plan, grace_s: float, stale_after_s: float):
        self._order, self._plan = order, plan
        self._grace_s, self._stale_after_s = grace_s, stale_after_s
        self._look_every_s = min(2.0, grace_s / 4)
        self._client = self._server = None
        if plan.certificates is not None:
            files = in_memory(plan.certificates)
            self._client, self._server = tls_context(files), tls_context(files, is_server=True)
        self._own = Report(order.seat, _draw())
        self._etcd: EtcdProcess | None = None
        self._own_id = ""
        """The member's id in etcd while it is joining; empty when there is nothing left to do."""
        self._heard: dict[int, tuple[Report, float]] = {}
        self._clock_s, self._read_s = 0.0, time.monotonic()
        self._settled: tuple[object, float] = (None, 0.0)
        self._leader_s = self._begun_s = self._next_life_s = 0.0
        self._voters = len(order.places)
        self._pause_s = 0.0
        self._used_s = self._looked_s = 0.0
        self._is_blind = self._was_used = False
        """Whether the member cannot see if it is used, and whether it was when it last could."""
        self._trouble = self._reason = ""
        self._stops = 0
        self._told: set[int] = set()
        """The seats that have answered since they know that this one leaves."""
        self._serving: set[asyncio.Task[None]] = set()

    def keep(self, ready: Callable[[], None], start_grace_s: float) -> str:
        """Keep the seat; return why it ended. ``ready`` is called once others can reach it.

        The first use may take ``start_grace_s``. Raises OSError if the supervisors' port is taken.
        """
        return asyncio.run(self._run(ready, start_grace_s))

    async def _run(self, ready: Callable[[], None], start_grace_s: float) -> str:
        self._used_s += start_grace_s - self._grace_s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._stop)
        port = self._order.places[self._order.seat].port + SUPERVISORS
        listeners = [_listener(address, port) for address in self._order.bind]
        ready()
        others = [seat for seat in range(len(self._order.places)) if seat != self._order.seat]
        work = [self._keep_time(), *map(self._accept, listeners), *map(self._talk, others)]
        tasks = [asyncio.create_task(it) for it in work]
        try:
            while not (end := self._end()):
                await self._look()
                await self._act(decide(self._view()))
                await asyncio.sleep(self._tick_s())
            return end
        finally:
            for task in tasks:
                task.cancel()
            for listener in listeners:
                listener.close()
            self._drop()

    async def _keep_time(self) -> None:
        while True:
            self._now_s()
            await asyncio.sleep(_IDLE_S)

    def _now_s(self) -> float:
        """Return for how long this process has run.

        After a pause it has seen neither nodes nor a leader, and that means nothing.
        """
        now = time.monotonic()
        self._clock_s += min(now - self._read_s, _PAUSE_S)
        self._read_s = now
        return self._clock_s

    def _stop(self) -> None:
        self._stops += 1
        self._own = replace(self._own, leaves=True)

    def _tick_s(self) -> float:
        member = self._own.member
        is_settled = member is not None and member.has_leader and not self._own_id
        return _IDLE_S if is_settled else _BUSY_S

    def _end(self) -> str:
        if self._stops > 1 or (self._stops and can_be_spared(self._view(), self._told)):
            return "a signal asked for it"
        limit_s = self._grace_s + (BLIND_S if self._is_blind and self._was_used else 0)
        return "no node uses it" if self._now_s() - self._used_s > limit_s else ""

    def _view(self) -> View:
        now, real = self._now_s(), time.monotonic()
        heard = {it.seat: it for it, at_s in self._heard.values() if real - at_s < HEARD_S}
        view = View(self._own, heard, len(self._order.places), voters=self._voters)
        free = free_seats(view)
        if self._settled[0] != free:
            self._settled = (free, now)
        return replace(view, settled_s=now - self._settled[1], leaderless_s=now - self._leader_s)

    # -- the member -------------------------------------------------------------------------------

    async def _look(self) -> None:
        """See how the member is, and whether its cluster is used."""
        now = self._now_s()
        member = self._own.member
        if self._etcd is None or member is None:
            if not self._own.life and now > self._next_life_s:
                self._own = replace(self._own, life=_draw())
            return
        if not self._etcd.running:
            self._fail(self._etcd.cause())
            return
        status = await self._ask_own("maintenance/status")
        has_leader = status is not None and int(status.get("leader", 0)) != 0
        learner = bool(status and status.get("isLearner"))
        # Not before its seat's old voters are removed: until then its cluster can spare no other.
        votes = not (learner or self._own_id) if has_leader else member.votes
        self._own = replace(self._own, member=replace(member, has_leader=has_leader, votes=votes))
        self._is_blind = self._is_blind or not has_leader
        if has_leader:
            self._leader_s, self._trouble = now, ""
            # While there is an old one beside, that seat says that it does not vote yet.
            self._voters = len(self._order.places)
        elif listed := await self._ask_own("cluster/member/list"):
            self._voters = sum(not it.learner for it in _entries(listed)) or self._voters
        if has_leader and not learner and now - self._looked_s > self._look_every_s:
            self._looked_s = now
            self._etcd.tidy()
            used = await self._is_used()
            self._is_blind = used is None
            self._was_used = self._was_used if used is None else used
            self._used_s = now if used else self._used_s

    async def _is_used(self) -> bool | None:
        """Whether a node has renewed a lease lately; ``None`` if etcd does not answer."""
        found = await self._ask_own("lease/leases")
        if found is None:
            return None
        for lease in found.get("leases", ()):
            reply = await self._ask_own("lease/timetolive", ID=lease["ID"])
            if reply is None:  # the others would not be answered either: each costs a time limit
                return None
            age_s = lease_age_s(reply)
            if age_s is not None and age_s <= self._stale_after_s:
                return True
        return False

    async def _act(self, decision: Decision) -> None:
        self._reason = decision.reason
        if decision.do is Do.ABANDON:
            self._trouble = f"gave up its etcd: {decision.reason}"
            self._drop()
        elif decision.do is Do.FOUND:
            self._found(decision)
        elif decision.do is Do.JOIN or self._own_id:
            try:
                while await self._join(decision.cluster):
                    pass  # at once: between two steps a loss may cost the majority
            except (OSError, ValueError, LookupError, TypeError) as error:  # it is tried again
                self._trouble = f"its etcd is not in the cluster yet: {error}"

    def _found(self, decision: Decision) -> None:
        token = decision.cluster or secrets.token_hex(8)
        cluster = ",".join(
            f"{life or f'absent{seat}'}={place.peer_url}"
            for seat, (place, life) in enumerate(
                zip(self._order.places, decision.founders, strict=True)
            )
        )
        self._start(Member(token, decision.founders), ("new", cluster))

    async def _join(self, cluster: str) -> bool:
        """Take one step towards a voter of our own; return whether another one may follow at once.

        Raises OSError, ValueError, LookupError, TypeError.
        """
        cluster = cluster if self._own.member is None else self._own.member.cluster
        members = [
            self._order.places[it.seat]
            for it in self._view().heard.values()
            if (member := it.member) is not None
            and (member.cluster, member.has_leader) == (cluster, True)
        ]
        if not members:
            return False
        via = secrets.choice(members)  # a learner refuses; then it is tried again
        own_seat, own = self._order.seat, self._order.places[self._order.seat]
        # Only a read makes sure that the list which the same member gives is not an old one.
        await self._post(via, "kv/range", {"key": "AA=="})
        listed = _entries(await self._post(via, "cluster/member/list", {}))
        step = next_step(listed, own_seat, own.peer_url, self._own_id)
        if step is None:
            self._own_id = ""
            return False
        if step[0] is Step.LEAVE:
            self._fail("it was removed from the cluster")
            return False
        if step[0] is Step.ADD:
            body: dict[str, object] = {"peerURLs": [own.peer_url], "isLearner": True}
            added = await self._post(via, "cluster/member/add", body)
            self._start_added(cluster, added)
            return False
        body = {"ID": step[1]}
        if step[0] is Step.RETIRE:
            body["peerURLs"] = [retired_url(own_seat, secrets.randbelow(1 << 16))]
        await self._post(via, f"cluster/member/{_REQUESTS[step[0]]}", body)
        return True

    def _start_added(self, cluster: str, added: dict[str, Any]) -> None:
        own_id = str(added["member"]["ID"])
        peers = ",".join(
            f"{self._own.life if it.id == own_id else it.id}={it.url}" for it in _entries(added)
        )
        self._start(Member(cluster, votes=False), ("existing", peers))
        self._own_id = own_id

    def _start(self, member: Member, initial: tuple[str, str]) -> None:
        """Start an etcd under the life of this seat, which is used up by that."""
        state, cluster = initial
        flags = ["--name", self._own.life, "--initial-cluster-token", member.cluster]
        flags += ["--initial-cluster-state", state, "--initial-cluster", cluster]
        flags += ["--listen-peer-urls", ",".join(self._order.peer_listen)]
        own = self._order.places[self._order.seat]
        flags += ["--initial-advertise-peer-urls", own.peer_url]
        # A leader asks whether it has a majority before it disturbs the others. Who may be removed
        # is decided here: etcd would not take in a new member while the old one is away.
        flags += ["--pre-vote", "--strict-reconfig-check=false"]
        self._own_id = ""
        self._own = replace(self._own, member=member)
        self._begun_s = self._leader_s = self._now_s()
        self._voters = len(self._order.places)
        try:
            self._etcd = EtcdProcess(self._plan)
            self._etcd.begin(tuple(flags))
        except (OSError, StartError) as error:
            self._fail(str(error))

    def _fail(self, cause: str) -> None:
        """The member has ended; the next one is started after a while that grows."""
        now = self._now_s()
        is_news = now - self._begun_s > _HEALTHY_AFTER_S
        self._pause_s = 0.5 if is_news else min(_LONGEST_PAUSE_S, max(0.5, 2 * self._pause_s))
        self._trouble = f"its etcd ended: {cause}"
        self._drop()
        self._own = replace(self._own, life="")
        self._next_life_s = now + self._pause_s

    def _drop(self) -> None:
        """End the member, if there is one, and delete its data."""
        if self._is_blind and self._was_used:
            self._used_s = self._now_s()  # its nodes may need some time to be seen again
        if self._etcd is not None:
            self._etcd.remove()
        self._etcd, self._own_id, self._is_blind = None, "", False
        self._own = replace(self._own, life=_draw(), member=None)

    async def _ask_own(self, path: str, **body: object) -> dict[str, Any] | None:
        if self._etcd is None:
            return None
        try:
            opening = asyncio.open_unix_connection(self._etcd.socket)
            return await _ask(opening, path, body)
        except (OSError, ValueError):
            return None

    # -- other supervisors, and agents ------------------------------------------------------------

    async def _post(self, place: Place, path: str, body: dict[str, object]) -> dict[str, Any]:
        return await _ask(self._connected(place, place.port), path, body)

    def _connected(self, place: Place, port: int) -> _Opening:
        name = None if self._client is None else without_zone(place.host)
        return asyncio.open_connection(
            place.host, port, limit=_LONGEST_LINE, ssl=self._client, server_hostname=name
        )

    async def _talk(self, seat: int) -> None:
        """Exchange reports with one other seat, again and again."""
        place = self._order.places[seat]
        while True:
            with contextlib.suppress(OSError, ValueError):
                port = place.port + SUPERVISORS
                reader, writer = await wait_for(self._connected(place, port), _ASK_LIMIT_S)
                try:
                    while True:
                        says_it, message = self._own.leaves, self._message()
                        writer.write(json.dumps(message).encode() + b"\n")
                        self._hear(_object(await wait_for(reader.readline(), _ASK_LIMIT_S)))
                        if says_it:
                            self._told.add(seat)
                        await asyncio.sleep(self._tick_s())
                finally:
                    writer.close()
            await asyncio.sleep(self._tick_s())

    def _message(self) -> dict[str, object]:
        return {
            "hosts": [place.name for place in self._order.places],
            "report": asdict(self._own),
            "unused_s": self._now_s() - self._used_s,
        }

    def _hear(self, message: dict[str, Any]) -> None:
        """Take in what another seat says; raises ValueError if it cannot be meant."""
        if message.get("hosts") != self._message()["hosts"]:
            raise ValueError("another list of hosts")
        report = report_from(message.get("report"))
        seats, unused_s = len(self._order.places), message.get("unused_s")
        founders = () if report.member is None else report.member.founders
        if report.seat == self._own.seat or not 0 <= report.seat < seats:
            raise ValueError("no other seat")
        if len(founders) not in (0, seats) or not isinstance(unused_s, float):
            raise ValueError("not of this cluster")
        self._heard[report.seat] = (report, time.monotonic())
        self._used_s = max(self._used_s, self._now_s() - max(0.0, unused_s))

    async def _accept(self, listener: socket.socket) -> None:
        """Serve those who connect, up to a number at a time: etcd needs descriptors as well."""
        room = asyncio.Semaphore(_MOST_CONNECTIONS)
        while True:
            await room.acquire()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # it has gone again, or there is no descriptor for it
                room.release()
                await asyncio.sleep(_BUSY_S)
                continue
            serving = asyncio.create_task(self._serve(connection))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            serving.add_done_callback(lambda _: room.release())

    async def _serve(self, connection: socket.socket) -> None:
        """Answer other supervisors, and agents and commands that ask how the cluster is."""
        reader = asyncio.StreamReader(_LONGEST_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, ValueError):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._server,
                ssl_handshake_timeout=None if self._server is None else _HANDSHAKE_LIMIT_S,
            )
            with contextlib.closing(asyncio.StreamWriter(transport, protocol, reader, loop)) as it:
                while line := await wait_for(reader.readline(), _IDLE_LIMIT_S):
                    it.write(json.dumps(self._reply(_object(line))).encode() + b"\n")
                    await wait_for(it.drain(), _ASK_LIMIT_S)

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError as :meth:`_hear`."""
        reply = self._message()
        if message.get("report") is not None:
            self._hear(message)
            return reply
        now = self._now_s()
        if message.get("waits"):
            self._used_s = now
        age_s = 0.0 if self._etcd is None else now - self._begun_s
        return reply | {"age_s": age_s, "trouble": self._trouble or self._reason}


# --- requests -------------------------------------------------------------------------------------


def _draw() -> str:
    return secrets.token_hex(8)


def _listener(address: str, port: int) -> socket.socket:
    """Listen as etcd does: at ``::`` for IPv4 as well. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.create_server(
        (address, port), family=family, dualstack_ipv6=address == "::", backlog=_MOST_CONNECTIONS
    )
    made.setblocking(False)
    return made


async def _ask(opening: _Opening, path: str, body: dict[str, object]) -> dict[str, Any]:
    """POST to etcd's gateway; raises OSError, or ValueError if it refuses."""
    return await wait_for(_answer_to(opening, path, body), _ASK_LIMIT_S)


async def _answer_to(opening: _Opening, path: str, body: dict[str, object]) -> dict[str, Any]:
    reader, writer = await opening
    try:
        writer.write(request.written(f"/v3/{path}", body))
        status, content = request.read(await reader.read(-1))
    finally:
        writer.close()
    if status != 200:
        raise ValueError(f"{path}: {content[:200]!r}")
    return _object(content)


def _object(text: bytes) -> dict[str, Any]:
    value = request.parsed(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _entries(listed: dict[str, Any]) -> list[Entry]:
    return [
        Entry(str(it["ID"]), it["peerURLs"][0], bool(it.get("isLearner")))
        for it in listed["members"]
    ]
