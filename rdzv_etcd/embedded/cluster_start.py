"""Make sure that an embedded cluster serves: start the seats of this machine, wait for a leader.

The agents' and commands' side of :mod:`rdzv_etcd.embedded.cluster`. Blocks.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.launch import StartedEtcd, Wait, launch, warn_of_strangers
from rdzv_etcd.embedded.port import check_owner, listen_addresses, listen_urls, own_addresses
from rdzv_etcd.embedded.program import is_locked
from rdzv_etcd.embedded.request import ask, ask_line, parsed
from rdzv_etcd.embedded.seat import (
    PEERS,
    SUPERVISORS,
    ClusterOrder,
    Place,
    Report,
    majority,
    report_from,
)
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Connection, Endpoint, Settings
from rdzv_etcd.settings.hosts import is_loopback, resolve
from rdzv_etcd.text import shown
from rdzv_etcd.trust import (
    NO_TLS,
    ONLY_TLS,
    connected,
    secured,
    speaks_tls,
    why_refused,
)

log = logging.getLogger(__name__)

_ASK_LIMIT_S = 1.0
_RETRY_START_S = 5.0
_RESTART_LIMIT_S = 30.0
_NAMES_LIMIT_S = 300.0
"""How long a node without a seat looks whether one of the names has come to be its machine's."""
_MOST_SHOWN = 300
_OLDEST_S = 1e9
_ERRORS = (OSError, ValueError, LookupError, TypeError)
"""What comes of asking something that is not what it should be."""


@dataclass(frozen=True, slots=True)
class SeatAnswer:
    """What the supervisor of a seat says."""

    own: Report
    age_s: float
    """How long its etcd has run, if it has one."""
    trouble: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why what answers on a supervisor's port cannot be used."""

    why: str
    has_other_hosts: bool = False
    """Whether it belongs to a cluster of another list of hosts; else it has another secret."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is known of an embedded cluster from outside."""

    hosts: tuple[str, ...]
    answers: Mapping[int, SeatAnswer]
    """By seat."""
    refused: Mapping[int, Refusal]
    """By seat."""

    @property
    def members(self) -> set[int]:
        """The seats with a vote in a cluster that has a leader."""
        own = {seat: answer.own.member for seat, answer in self.answers.items()}
        return {seat for seat, it in own.items() if it is not None and it.has_leader and it.votes}

    @property
    def missing(self) -> dict[int, str]:
        """The seats without a member, and why."""
        why = dict.fromkeys(range(len(self.hosts)), "nothing answers on its supervisor's port")
        why |= {seat: it.why for seat, it in self.refused.items()}
        why |= {seat: it.trouble for seat, it in self.answers.items()}
        return {seat: text for seat, text in why.items() if seat not in self.members}

    def why_missing(self) -> str:
        """The hosts without a member, and why; empty if there are none."""
        return "; ".join(f"{self.hosts[seat]}: {why}" for seat, why in self.missing.items())

    def __str__(self) -> str:
        named = [
            f"{self.hosts[it]} (up {timedelta(seconds=int(self.answers[it].age_s))})"
            for it in sorted(self.members)
        ]
        missing = f"; {why}" if (why := self.why_missing()) else ""
        return f"embedded cluster with members on {', '.join(named) or 'no host'}{missing}"


def cluster_endpoints(connection: Connection) -> tuple[Endpoint, ...]:
    """Return the endpoints in the order of their seats, whatever the order they were given in.

    Raises :class:`SettingsError` if they cannot be the hosts of a cluster. May look up names.
    """
    endpoints = tuple(sorted(connection.endpoints, key=lambda it: (it.host, it.port)))
    if len(endpoints) % 2 == 0:
        raise SettingsError(
            f"embed=1 with {len(endpoints)} endpoints ({connection}) survives no more losses than "
            f"with {len(endpoints) - 1}, as etcd needs a majority: name one host, three or five"
        )
    zoned = next((it.target for it in endpoints if "%" in it.host), None)
    if zoned is not None and connection.secret is not None:
        raise SettingsError(
            f"embed=1: {zoned} has a zone, which is in no certificate: members of a cluster with a "
            "secret cannot trust each other there; write names, or addresses without a zone"
        )
    names: dict[tuple[str, int], Endpoint] = {}
    for endpoint in endpoints:
        for address in resolve(endpoint.host):
            other = names.setdefault((address, endpoint.port), endpoint)
            if other is not endpoint:
                raise SettingsError(
                    f"embed=1: {other.target} and {endpoint.target} are the same address, "
                    f"{address}: each endpoint must be another host"
                )
    return endpoints


def cluster_state(connection: Connection, *, waits: bool = False) -> ClusterState:
    """Ask all seats; blocks for about two seconds for each that is silent. ``waits``: a node is
    about to use the cluster. Raises :class:`SettingsError` as :func:`cluster_endpoints`.
    """
    endpoints = cluster_endpoints(connection)
    hosts = tuple(endpoint.target for endpoint in endpoints)
    answers: dict[int, SeatAnswer] = {}
    refused: dict[int, Refusal] = {}
    for seat, endpoint in enumerate(endpoints):
        answer = _ask_seat(endpoint, hosts, connection.secret, waits=waits)
        if isinstance(answer, SeatAnswer):
            answers[seat] = answer
        elif answer is not None:
            refused[seat] = answer
    return ClusterState(hosts, answers, refused)


def _check_agreement(state: ClusterState, own: Iterable[int]) -> None:
    """Raise :class:`EmbeddedEtcdError` if a seat has another list of hosts, as a client could end
    up in that cluster; and if seats have another secret, which keeps clients out, and the rest is
    no majority. ``own``: the seats that this machine has, or is about to have."""
    # It counts once: only on loopback has it several.
    agree = {*state.answers, *list(own)[:1]} - set(state.refused)
    for seat, it in state.refused.items():
        if it.has_other_hosts or len(agree) < majority(len(state.hosts)):
            raise EmbeddedEtcdError(f"{state.hosts[seat]} cannot be used: {it.why}")


def check_alone(endpoint: Endpoint, secret: str | None) -> None:
    """Raise :class:`EmbeddedEtcdError` if the etcd that answers there is one of a cluster's.

    A node that knows this one only would be lost with it. Blocks for seconds only if it is.
    """
    try:
        if len(_posted(endpoint, "cluster/member/list", secret)["members"]) == 1:
            return  # its supervisors' port, which a firewall may make silent, need not be asked
    except _ERRORS:
        pass
    answer = _ask_seat(endpoint, (endpoint.target,), secret, waits=False)
    if isinstance(answer, Refusal) and answer.has_other_hosts:
        raise EmbeddedEtcdError(f"{endpoint.target} cannot be used: {answer.why}")


class SeatKeeper:
    """Keeps the seats of this machine while a node is here, and logs which hosts have members."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings, self._environ = settings, environ
        self._endpoints = cluster_endpoints(settings.connection)
        self._own = _own_seats(self._endpoints)
        self._names_until_s = time.monotonic() + _NAMES_LIMIT_S
        self._seen: tuple[set[int], set[int]] = set(range(len(self._endpoints))), set()
        self._trouble = ""

    def look(self) -> None:
        """Start supervisors that do not run, and log what has changed. Blocks for seconds."""
        try:
            if not self._own and time.monotonic() < self._names_until_s:
                self._own = _own_seats(self._endpoints)
            for seat in self._own:
                self._keep(seat)
            if self._own:
                self._log_change(cluster_state(self._settings.connection))
            self._trouble = ""
        except (EmbeddedEtcdError, SettingsError, OSError) as error:  # it is tried again
            if self._trouble != str(error):
                self._trouble = str(error)
                log.warning("%s", error)

    def _keep(self, seat: int) -> None:
        """One has ended, or its name leads to this machine only now, as that of a new pod does."""
        where = self._endpoints[seat].target
        if is_locked(where):
            return
        wait = Wait("member of the embedded cluster", where, _RESTART_LIMIT_S)
        args = self._settings, self._environ, self._endpoints, seat, wait
        if wait.through(lambda: start_seat(*args)) is not None:
            log.warning(
                "no supervisor of the embedded cluster's member on %s ran: one was started", where
            )

    def _log_change(self, state: ClusterState) -> None:
        seen = state.members, set(state.refused)
        if seen == self._seen:
            return
        self._seen, needed = seen, majority(len(state.hosts))
        if len(state.members) > needed:
            log.log(logging.WARNING if state.refused else logging.INFO, "%s", state)
        elif len(state.members) == needed:
            log.warning("%s; no more may be lost", state)
        else:
            log.warning("%s; without a majority training continues until the next change", state)


def _own_seats(endpoints: Sequence[Endpoint]) -> dict[int, tuple[str, ...]]:
    """Return the seats that are this machine's, with their addresses.

    Only on loopback may there be more than one. Raises :class:`SettingsError`.
    """
    own = {seat: own_addresses(endpoint.host) for seat, endpoint in enumerate(endpoints)}
    found = {seat: addresses for seat, addresses in own.items() if addresses}
    names = [endpoints[seat].target for seat in found if not is_loopback(endpoints[seat].host)]
    if len(names) > 1:
        raise SettingsError(
            f"embed=1: {' and '.join(names)} are all this machine ({socket.gethostname()}): each "
            "endpoint must be another host, so that the loss of one leaves a majority"
        )
    return found


def ensure_cluster(
    settings: Settings, environ: Mapping[str, str], wait: Wait
) -> StartedEtcd | None:
    """Return when the cluster serves.

    Starts the supervisors of those endpoints that are this machine's, and returns the first of
    these. Raises as :func:`rdzv_etcd.embedded.start.ensure_etcd`.
    """
    connection = settings.connection
    endpoints = cluster_endpoints(connection)
    own, next_start_s, started = _own_seats(endpoints), 0.0, None
    while True:
        # Before a seat is begun: hosts may have another list.
        state = cluster_state(connection, waits=True)
        _check_agreement(state, own)
        if time.monotonic() >= next_start_s:
            next_start_s = time.monotonic() + _RETRY_START_S
            own = own or _own_seats(endpoints)  # names may come into DNS late
            for seat in own:
                if not is_locked(endpoints[seat].target):
                    begun = start_seat(settings, environ, endpoints, seat, wait)
                    if begun is not None and started is None:
                        more = (0, PEERS, SUPERVISORS)
                        warn_of_strangers(connection, {endpoints[seat].port + it for it in more})
                    started = started or begun
        serves = any(_is_healthy(endpoints[seat], connection.secret) for seat in state.members)
        stranger = _stranger(connection, endpoints, state) if serves else ""
        if serves and not stranger:
            for seat, addresses in own.items():
                check_owner(endpoints[seat], addresses)
            if state.refused:
                log.warning("%s", state)
            return started
        wait.pause(stranger or state.why_missing())


def start_seat(
    settings: Settings,
    environ: Mapping[str, str],
    endpoints: Sequence[Endpoint],
    seat: int,
    wait: Wait,
) -> StartedEtcd | None:
    """Start the supervisor of a seat; return ``None`` if another process has meanwhile."""
    endpoint, addresses = endpoints[seat], listen_addresses(endpoints[seat].host)
    binary, scheme = find_binary(environ), settings.connection.scheme
    places = tuple(
        Place(it.target, it.host, it.port, *listen_urls((it.host,), it.port + PEERS, scheme))
        for it in endpoints
    )
    peers = listen_urls(addresses, endpoint.port + PEERS, scheme)
    cluster = ClusterOrder(seat, places, addresses, peers)
    started = launch(settings, binary, addresses, environ, wait, cluster=cluster)
    if started is not None:
        log.info(
            "started a member of an embedded cluster on %s (etcd %s, %s, supervisor pid %s)",
            endpoint.target,
            binary.version,
            binary.path,
            started.supervisor_pid,
        )
    return started


# --- asking ---------------------------------------------------------------------------------------


def _ask_seat(
    endpoint: Endpoint, hosts: tuple[str, ...], secret: str | None, *, waits: bool
) -> SeatAnswer | Refusal | None:
    """Return what its supervisor answers, or why it cannot be used; ``None`` if none answers."""
    host, port = endpoint.host, endpoint.port + SUPERVISORS
    try:
        connection = socket.create_connection((host, port), _ASK_LIMIT_S)
    except (OSError, ValueError):
        return None
    question = {"hosts": hosts, "waits": waits}
    try:
        return _seat_answer(secured(connection, host, secret), question)
    except _ERRORS as error:
        why = why_refused(error) or _other_way(host, port, secret, {**question, "waits": False})
        return Refusal(why) if why else None


def _seat_answer(connection: socket.socket, question: dict[str, Any]) -> SeatAnswer | Refusal:
    """Ask; raises one of ``_ERRORS`` if it is no supervisor that answers."""
    reply = ask_line(connection, question, _ASK_LIMIT_S)
    hosts, here = tuple(map(str, reply["hosts"])), question["hosts"]
    if hosts != here:
        return Refusal(
            f"it belongs to an embedded cluster of other hosts: here {','.join(here)}, there "
            f"{shown(','.join(hosts), _MOST_SHOWN)}; give every node the same --rdzv-endpoint, or "
            "another port for another cluster",
            has_other_hosts=True,
        )
    own, age_s = report_from(reply["report"]), reply["age_s"]
    if not 0 <= age_s < _OLDEST_S:
        raise ValueError("out of range")
    return SeatAnswer(own, age_s, shown(str(reply["trouble"]), _MOST_SHOWN))


def _other_way(host: str, port: int, secret: str | None, question: dict[str, Any]) -> str:
    """Return what is wrong if it answers over TLS only, or in plain text only."""
    try:
        if secret is None:
            return ONLY_TLS if speaks_tls(host, port, _ASK_LIMIT_S) else ""
        _seat_answer(connected(host, port, _ASK_LIMIT_S), question)
    except _ERRORS:
        return ""
    return NO_TLS


def _stranger(connection: Connection, endpoints: Sequence[Endpoint], state: ClusterState) -> str:
    """Return what is wrong if an etcd of another cluster answers at one of the endpoints.

    Clients use any of these: some nodes would find each other there.
    """
    found = {
        seat: _cluster_id(endpoint, connection.secret) for seat, endpoint in enumerate(endpoints)
    }
    known = {found[seat] for seat in state.members}
    others = [endpoints[seat].target for seat, it in found.items() if it and it not in known]
    return f"an etcd that is not of this cluster answers at {', '.join(others)}" if others else ""


def _cluster_id(endpoint: Endpoint, secret: str | None) -> str:
    """Return the id of the cluster of the etcd that answers there; empty if none does."""
    try:
        return str(_posted(endpoint, "maintenance/status", secret)["header"]["cluster_id"])
    except _ERRORS:
        return ""


def _posted(endpoint: Endpoint, path: str, secret: str | None) -> Any:
    """Ask the etcd that answers there; raises one of ``_ERRORS`` if it does not say."""
    connection = connected(endpoint.host, endpoint.port, _ASK_LIMIT_S, secret)
    status, page = ask(connection, f"/v3/{path}", _ASK_LIMIT_S, {})
    if status != 200:
        raise ValueError(f"status {status}")
    return parsed(page)


def _is_healthy(endpoint: Endpoint, secret: str | None) -> bool:
    """Whether etcd can write there, now."""
    try:
        connection = connected(endpoint.host, endpoint.port, _ASK_LIMIT_S, secret)
        _, page = ask(connection, "/health", _ASK_LIMIT_S)
        return b'"health":"true"' in page
    except (OSError, ValueError):
        return False
