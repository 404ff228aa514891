"""Make sure an etcd answers at the endpoint: use it, start it, or wait for the node that starts it.

Knows who may start it and how long to wait. Blocks; called before a group connects.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from functools import partial

from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.cluster_start import check_alone, ensure_cluster
from rdzv_etcd.embedded.launch import StartedEtcd, Wait, launch, warn_of_strangers
from rdzv_etcd.embedded.port import (
    Found,
    PortAnswer,
    check_owner,
    listen_addresses,
    listeners,
    own_addresses,
    probe,
    reached_by,
)
from rdzv_etcd.embedded.program import is_locked
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Connection, Endpoint, Settings
from rdzv_etcd.settings.hosts import is_loopback, resolve
from rdzv_etcd.trust import GIVE_ALL

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_RETRY_START_S = 5.0


def ensure_etcd(settings: Settings, environ: Mapping[str, str] | None = None) -> StartedEtcd | None:
    """Return when an etcd answers at the endpoint; blocks for at most ``join_timeout_s``.

    If none answers and the endpoint names this machine, one is started; nodes on other machines,
    and those here that came second, wait for it. With a secret it is closed to all without.
    Returns what was started, ``None`` if nothing had to be. Without ``embed`` it returns at once.

    Raises :class:`EmbeddedEtcdError` if etcd is not installed, does not start, belongs to another
    user of this machine or to a cluster, has another secret or none, the port is taken by something
    else, or no node started one in time; :class:`SettingsError` if the connection is of a kind that
    cannot be embedded.
    """
    if not settings.embed:
        return None
    environ = os.environ if environ is None else environ
    check_embeddable(settings.connection)
    what, ensure = ("etcd", _ensure_one)
    if settings.embeds_cluster:
        what, ensure = ("embedded cluster", ensure_cluster)
    wait = Wait(what, str(settings.connection), settings.timing.join_timeout_s)
    return wait.through(partial(ensure, settings, environ, wait))


def endpoints_here(connection: Connection) -> tuple[Endpoint, ...]:
    """Return the endpoints that are this machine's; may block for look-ups."""
    return tuple(it for it in connection.endpoints if own_addresses(it.host))


def check_embeddable(connection: Connection) -> None:
    """Raise :class:`SettingsError` if the connection is to an etcd of one's own."""
    if connection.credentials is not None:
        raise SettingsError(
            "an embedded etcd has no users and passwords: leave out RDZV_ETCD_USER, "
            "RDZV_ETCD_PASSWORD, user_file and password_file, or for an etcd of your own embed=1; "
            f"to keep others out of an embedded one, {GIVE_ALL}"
        )
    if connection.tls is not None and connection.secret is None:
        raise SettingsError(
            f"an embedded etcd speaks https only with a secret ({connection}): {GIVE_ALL}"
        )


def _ensure_one(settings: Settings, environ: Mapping[str, str], wait: Wait) -> StartedEtcd | None:
    (endpoint,), where = settings.connection.endpoints, str(settings.connection)
    silent_since_s, next_start_s = None, 0.0
    while True:
        found = probe(endpoint, _PROBE_TIMEOUT_S, settings.connection.secret)
        now_s = time.monotonic()
        if found.answer is PortAnswer.ETCD:
            check_owner(endpoint, own_addresses(endpoint.host))
            check_alone(endpoint, settings.connection.secret)
            return None
        _refuse_strangers(where, found)
        if found.answer is not PortAnswer.SILENCE or is_locked(endpoint.port):
            silent_since_s = None
        elif silent_since_s is None:
            silent_since_s = now_s
        elif now_s - silent_since_s > settings.connection.connect_timeout_s:
            raise EmbeddedEtcdError(
                f"{where}: {found.answer.value} (waited "
                f"{settings.connection.connect_timeout_s:g} s for etcd to answer)"
            )
        if found.answer is PortAnswer.NOTHING and now_s >= next_start_s:
            addresses = () if is_locked(endpoint.port) else listen_addresses(endpoint.host)
            if addresses:
                next_start_s = now_s + _RETRY_START_S
                started = _start(settings, addresses, environ, wait)
                if started is not None:
                    return started
        wait.pause(partial(_why_none_answers, endpoint, found))


def _start(
    settings: Settings,
    addresses: tuple[str, ...],
    environ: Mapping[str, str],
    wait: Wait,
) -> StartedEtcd | None:
    """Start it at this machine's ``addresses``; return ``None`` if another process has meanwhile,
    or is about to."""
    (endpoint,), where = settings.connection.endpoints, str(settings.connection)
    binary = find_binary(environ)
    try:
        started = launch(settings, binary, addresses, environ, wait)
    except EmbeddedEtcdError:
        found = probe(endpoint, _PROBE_TIMEOUT_S, settings.connection.secret)
        if found.answer is PortAnswer.ETCD:
            return None
        _refuse_strangers(where, found)
        raise
    if started is None:
        return None
    log.info(
        "started an embedded etcd %s (%s, supervisor pid %s) at %s; it stops by itself %g s "
        "after the last node has left",
        binary.version,
        binary.path,
        started.supervisor_pid,
        where,
        settings.embed_grace_s,
    )
    warn_of_strangers(settings.connection, {endpoint.port})
    most = settings.job.max_nodes
    if most > 1 and is_loopback(endpoint.host):
        log.warning(
            "started an etcd at %s, which no other machine can reach by that endpoint: if the "
            "%d nodes of job %r are not all on this machine, each machine now has an etcd of "
            "its own; name one of the machines in --rdzv-endpoint",
            where,
            most,
            settings.job_id,
        )
    return started


def _refuse_strangers(where: str, found: Found) -> None:
    """Raise if what listens there is no etcd that can be used."""
    if found.answer is PortAnswer.MISTRUST:
        raise EmbeddedEtcdError(f"{where}: {found.answer.value}: {found.detail}")
    if found.answer is PortAnswer.STRANGER:
        raise EmbeddedEtcdError(
            f"{where}: {found.answer.value}; free the port or choose another in --rdzv-endpoint"
        )


def _why_none_answers(endpoint: Endpoint, found: Found) -> str:
    """Return the cause, as far as this machine can tell, and what to do. Blocks for a look-up."""
    own = own_addresses(endpoint.host)
    if own:
        return _why_none_answers_here(endpoint, found, own)
    addresses = resolve(endpoint.host)
    if not addresses:
        return (
            f"{found.answer.value}: {endpoint.host} cannot be resolved on this machine; is it "
            "spelt right in --rdzv-endpoint?"
        )
    detail = f" ({found.detail})" if found.detail else ""
    if endpoint.host not in addresses:
        detail = f" at {', '.join(addresses)}{detail}"
    return (
        f"{found.answer.value}{detail}. {endpoint.host} is not this machine "
        f"({socket.gethostname()}); is that right, and is a node running there with embed=1?"
    )


def _why_none_answers_here(endpoint: Endpoint, found: Found, own: tuple[str, ...]) -> str:
    if not is_locked(endpoint.port):
        return f"{found.answer.value}. {endpoint.host} is this machine; it will be tried again"
    elsewhere = [
        listener.address
        for listener in listeners(endpoint.port)
        if not any(reached_by(listener, address) for address in own)
    ]
    if elsewhere and found.answer is PortAnswer.NOTHING:
        return (
            "another process keeps an embedded etcd on this port that listens only on "
            f"{', '.join(elsewhere)}; give every node the same --rdzv-endpoint"
        )
    return (
        f"{found.answer.value}; another process of this machine is starting it (the supervisor of "
        f"an embedded etcd, or `rdzv-etcd serve`, for port {endpoint.port})"
    )
