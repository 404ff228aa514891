"""Make sure that an embedded cluster serves: start the seats of this machine, wait for a leader.

The agents' and commands' side of :mod:`rdzv_etcd.embedded.cluster`. Blocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.launch import StartedEtcd, Wait, launch, warn_of_strangers
from rdzv_etcd.embedded.port import check_owner, listen_addresses, listen_urls, own_addresses
from rdzv_etcd.embedded.program import is_locked
from rdzv_etcd.embedded.request import ask, ask_line
from rdzv_etcd.embedded.seat import (
    PEERS,
    SUPERVISORS,
    ClusterOrder,
    Place,
    Report,
    majority,
    missing,
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
_PAUSE_S = 0.1
_RETRY_START_S = 5.0
_RESTART_LIMIT_S = 30.0
_NAMES_LIMIT_S = 300.0
"""How long a node without a seat looks whether one of the names has come to be its machine's."""
_MOST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class SeatAnswer:
    """What the supervisor of a seat says."""

    hosts: tuple[str, ...]
    own: Report
    heard: tuple[Report, ...]
    trouble: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is known of an embedded cluster from outside."""

    hosts: tuple[str, ...]
    answers: Mapping[int, SeatAnswer]
    """By seat; seats that do not answer are missing."""

    @property
    def members(self) -> set[int]:
        """The seats with a vote in a cluster that has a leader."""
        heard = {it.seat: it for answer in self.answers.values() for it in answer.heard}
        own = {seat: answer.own for seat, answer in self.answers.items()}
        return {
            seat
            for seat, report in {**heard, **own}.items()
            if report.member is not None and report.member.has_leader and report.member.votes
        }

    def missing(self) -> str:
        """The hosts without a member, and why as far as that is known; empty if there are none."""
        silent = missing(self.hosts, self.answers)
        parts = [f"nothing answers on the supervisors' port of {silent}"] if silent else []
        parts += [
            f"{self.hosts[seat]}: {answer.trouble}"
            for seat, answer in sorted(self.answers.items())
            if seat not in self.members
        ]
        return "; ".join(parts)

    def __str__(self) -> str:
        named = ", ".join(self.hosts[seat] for seat in sorted(self.members)) or "no host"
        missing = f"; {why}" if (why := self.missing()) else ""
        return f"embedded cluster with members on {named}{missing}"


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
    about to use the cluster.

    Raises :class:`EmbeddedEtcdError` if one of them has another list of hosts or another secret,
    :class:`SettingsError` as :func:`cluster_endpoints`.
    """
    endpoints = cluster_endpoints(connection)
    hosts = tuple(endpoint.target for endpoint in endpoints)
    answers = {}
    for seat, endpoint in enumerate(endpoints):
        answer = _ask_seat(endpoint, hosts, connection.secret, waits=waits)
        if answer is not None:
            _check_hosts(endpoint, hosts, answer.hosts)
            answers[seat] = answer
    return ClusterState(hosts, answers)


def check_alone(endpoint: Endpoint, secret: str | None) -> None:
    """Raise :class:`EmbeddedEtcdError` if the etcd that answers there is one of a cluster's.

    A node that knows this one only would be lost with it. Blocks for a second if nothing answers on
    the supervisors' port, which is what is expected.
    """
    answer = None
    with contextlib.suppress(EmbeddedEtcdError):  # it speaks TLS, say, and is no supervisor
        answer = _ask_seat(endpoint, (endpoint.target,), secret, waits=False)
    if answer is not None:
        _check_hosts(endpoint, (endpoint.target,), answer.hosts)


def _check_hosts(endpoint: Endpoint, here: Sequence[str], there: Sequence[str]) -> None:
    if here != there:
        raise EmbeddedEtcdError(
            f"{endpoint.target} belongs to an embedded cluster of other hosts: here "
            f"{','.join(here)}, there {shown(','.join(there), _MOST_SHOWN)}; give every node the "
            "same --rdzv-endpoint, or another port for another cluster"
        )


def describe_cluster(connection: Connection) -> str:
    """Return a line on the members, or why there is none; blocks as :func:`cluster_state`."""
    try:
        return str(cluster_state(connection))
    except (EmbeddedEtcdError, SettingsError) as error:
        return str(error)


class SeatKeeper:
    """Keeps the seats of this machine while a node is here, and logs which hosts have members."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings, self._environ = settings, environ
        self._endpoints = cluster_endpoints(settings.connection)
        self._own = _own_seats(self._endpoints)
        self._names_until_s = time.monotonic() + _NAMES_LIMIT_S
        self._members = set(range(len(self._endpoints)))
        self._trouble = ""

    def look(self) -> None:
        """Start a supervisor that has ended, and log what has changed. Blocks for seconds."""
        try:
            self._find_own()
            for seat in self._own:
                self._keep(seat)
            if self._own:
                self._log_change(cluster_state(self._settings.connection))
            self._trouble = ""
        except (EmbeddedEtcdError, SettingsError) as error:  # it is tried again
            if self._trouble != str(error):
                self._trouble = str(error)
                log.warning("%s", error)

    def _find_own(self) -> None:
        """Start a seat whose name leads to this machine only now, as that of a new pod does."""
        if self._own or time.monotonic() > self._names_until_s:
            return
        self._own = _own_seats(self._endpoints)
        for seat in self._own:
            self._start(seat)

    def _keep(self, seat: int) -> None:
        if is_locked(self._endpoints[seat].target):
            return
        if self._start(seat):
            log.warning(
                "the supervisor of the embedded cluster's member on %s had ended: another one was "
                "started",
                self._endpoints[seat].target,
            )

    def _start(self, seat: int) -> bool:
        """Return whether a supervisor was started, and not by another process meanwhile."""
        deadline_s = time.monotonic() + _RESTART_LIMIT_S
        started = start_seat(self._settings, self._environ, self._endpoints, seat, deadline_s)
        return started is not None

    def _log_change(self, state: ClusterState) -> None:
        if state.members == self._members:
            return
        self._members, needed = state.members, majority(len(state.hosts))
        if len(state.members) > needed:
            log.info("%s", state)
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


def ensure_cluster(settings: Settings, environ: Mapping[str, str]) -> StartedEtcd | None:
    """Return when the cluster serves; blocks for at most ``join_timeout_s``.

    Starts the supervisors of those endpoints that are this machine's, and returns the first of
    these. Raises as :func:`rdzv_etcd.embedded.start.ensure_etcd`.
    """
    connection = settings.connection
    endpoints = cluster_endpoints(connection)
    own, next_start_s, started = _own_seats(endpoints), 0.0, None
    wait = Wait("embedded cluster", str(connection), settings.timing.join_timeout_s)
    while True:
        # Before a seat is begun: hosts may have another list.
        state = cluster_state(connection, waits=True)
        if time.monotonic() >= next_start_s:
            next_start_s = time.monotonic() + _RETRY_START_S
            own = own or _own_seats(endpoints)  # names may come into DNS late
            for seat in own:
                if not is_locked(endpoints[seat].target):
                    begun = start_seat(settings, environ, endpoints, seat, wait.deadline_s)
                    if begun is not None and started is None:
                        more = (0, PEERS, SUPERVISORS)
                        warn_of_strangers(connection, {endpoints[seat].port + it for it in more})
                    started = started or begun
        serves = any(_is_healthy(endpoints[seat], connection.secret) for seat in state.members)
        stranger = _stranger(connection, endpoints, state) if serves else ""
        if serves and not stranger:
            for seat, addresses in own.items():
                check_owner(endpoints[seat], addresses)
            return started
        wait.note(partial(str, stranger or state.missing()))
        time.sleep(_PAUSE_S)  # there is no process yet that could announce the start


def start_seat(
    settings: Settings,
    environ: Mapping[str, str],
    endpoints: Sequence[Endpoint],
    seat: int,
    deadline_s: float,
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
    started = launch(settings, binary, addresses, environ, deadline_s, cluster=cluster)
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
    endpoint: Endpoint, hosts: Sequence[str], secret: str | None, *, waits: bool
) -> SeatAnswer | None:
    """Return ``None`` if no supervisor answers there; raises as :func:`cluster_state`."""
    host, port = endpoint.host, endpoint.port + SUPERVISORS
    try:
        connection = socket.create_connection((host, port), _ASK_LIMIT_S)
    except (OSError, ValueError):
        return None
    question = {"hosts": hosts, "waits": waits}
    try:
        return _seat_answer(secured(connection, host, secret), question)
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = why_refused(error) or _other_way(host, port, secret, {**question, "waits": False})
    if why:
        raise EmbeddedEtcdError(f"the embedded cluster on {endpoint.target} cannot be used: {why}")
    return None


def _seat_answer(connection: socket.socket, question: dict[str, object]) -> SeatAnswer:
    """Raises OSError, ValueError, LookupError, TypeError."""
    reply = ask_line(connection, question, _ASK_LIMIT_S)
    heard = tuple(report_from(report) for report in reply["heard"])
    trouble = shown(str(reply["trouble"]), _MOST_SHOWN)
    return SeatAnswer(tuple(reply["hosts"]), report_from(reply["report"]), heard, trouble)


def _other_way(host: str, port: int, secret: str | None, question: dict[str, object]) -> str:
    """Return what is wrong if it answers over TLS only, or in plain text only."""
    try:
        if secret is None:
            return ONLY_TLS if speaks_tls(host, port, _ASK_LIMIT_S) else ""
        _seat_answer(connected(host, port, _ASK_LIMIT_S), question)
    except (OSError, ValueError, LookupError, TypeError):
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
        connection = connected(endpoint.host, endpoint.port, _ASK_LIMIT_S, secret)
        status, page = ask(connection, "/v3/maintenance/status", _ASK_LIMIT_S, {})
        return str(json.loads(page)["header"]["cluster_id"]) if status == 200 else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _is_healthy(endpoint: Endpoint, secret: str | None) -> bool:
    """Whether etcd can write there, now."""
    try:
        connection = connected(endpoint.host, endpoint.port, _ASK_LIMIT_S, secret)
        _, page = ask(connection, "/health", _ASK_LIMIT_S)
        return b'"health":"true"' in page
    except (OSError, ValueError):
        return False
